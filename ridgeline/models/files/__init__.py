"""Model files: the registry of names, pull, safetensors and GGUF containers."""
