"""A checkpoint's tensors in a backend's layout: loaded, converted, packed, cached."""
