"""hardware: what chips can do at most, with a source for every figure."""
