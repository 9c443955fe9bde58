"""The forward pass and sampling of a planned step: runners for the native library, torch and CUDA."""
