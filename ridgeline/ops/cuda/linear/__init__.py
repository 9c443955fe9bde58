"""Matrix products: `linear` chooses the kernel by the number of tokens."""
