"""Sampling on the device: filters, penalties, log-probabilities, state per sequence."""
