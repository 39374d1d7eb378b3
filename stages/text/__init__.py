"""Text in and text out: vocabulary, tokenizer, chat template, detokenizer, stop strings. Knows no tensors."""
