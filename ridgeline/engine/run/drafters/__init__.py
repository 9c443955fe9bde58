"""Drafters that compute: a second model, or a head on the hidden states of the one that is served."""
