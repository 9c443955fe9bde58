"""Model descriptions: ModelSpec, EncoderSpec, the family table, readers of config.json and GGUF metadata."""
