"""Texts to chunks: pure functions that return offsets into the text, never copies of it."""
