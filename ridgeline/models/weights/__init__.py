"""A checkpoint's tensors as a backend computes with them: loaded, converted, packed, cached."""
