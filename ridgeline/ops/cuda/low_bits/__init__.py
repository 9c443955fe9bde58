"""Products with matrices in 8 and 4 bits (`ops.low_bits`): `products` chooses the kernel."""
