"""Attention kernels: decode, prefill, shared prefixes, and writing keys and values to the paged cache."""
