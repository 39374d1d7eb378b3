"""Second stage: computes prompts in chunks, hands KV on chunk by chunk, samples token 0."""
