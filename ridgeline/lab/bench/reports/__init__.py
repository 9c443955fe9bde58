"""A run as a page and as text."""
