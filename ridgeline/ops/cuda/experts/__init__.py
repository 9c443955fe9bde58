"""Routed experts on the GPU: the choice, the grouping of rows by expert, and the experts' products."""
