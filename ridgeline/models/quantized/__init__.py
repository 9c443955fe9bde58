"""Quantized weights as data: formats, numbers, rounding, packings, and the configs that name them."""
