"""Exact search over the vectors of a namespace, in memory."""
