"""Models written as GGUF files: recipes, metadata, tokenizers, tensors. `write.write_gguf` is the entry."""
