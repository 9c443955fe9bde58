"""Models: ModelSpec, decoders, weight loaders, tokenizers, chat templates, the model registry."""
