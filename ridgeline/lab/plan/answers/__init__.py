"""A plan written down: for the terminal, as a page, as files."""
