"""What a model is: ModelSpec and EncoderSpec, the family table, readers of config.json and GGUF metadata."""
