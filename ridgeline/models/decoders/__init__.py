"""The forward pass of a decoder: the reference in torch, and the CUDA one."""
