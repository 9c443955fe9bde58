"""What is computed: ModelSpec, decoder, weight loaders, tokenizers, chat templates, the model registry."""
