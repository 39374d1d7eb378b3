"""Last stage: continuous batching over paged KV, speculation, text."""
