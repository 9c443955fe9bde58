"""Paired statistics. Pure functions, no scipy."""
