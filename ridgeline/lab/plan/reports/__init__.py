"""The output of a plan: for the terminal, as a page, as files."""
