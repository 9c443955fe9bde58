"""Draft heads: what they are, their files, and their arithmetic."""
