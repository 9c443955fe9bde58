"""Readers of ModelSpec: config.json and GGUF metadata of served families; config.json of planned ones."""
