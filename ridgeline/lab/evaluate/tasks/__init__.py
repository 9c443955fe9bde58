"""Tasks: what is asked, in which form, and where the data lies."""
