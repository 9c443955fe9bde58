"""Matrices that a GPU computes in 8 and 4 bits: which ones, and how they are loaded."""
