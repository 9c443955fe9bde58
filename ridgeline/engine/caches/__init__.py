"""Caches that shorten a start, shipped between replicas: packed weights of the CPU, kernels of the GPU."""
