"""knowledge: what each technique is, when it pays, when it hurts, and the figures behind it."""
