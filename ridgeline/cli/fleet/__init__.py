"""The verbs of `ridgeline fleet`."""
