"""Attention kernels: decode, prefill, shared prefixes, and what writes keys and values to the paged cache."""
