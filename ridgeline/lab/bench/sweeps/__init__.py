"""Runs over rates or concurrencies, up to the knee."""
