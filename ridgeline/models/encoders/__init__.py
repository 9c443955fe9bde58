"""The forward pass of an encoder, and its weights."""
