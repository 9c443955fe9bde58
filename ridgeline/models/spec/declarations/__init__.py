"""Model families as declarations, a file for each group of relatives. `families` has the table."""
