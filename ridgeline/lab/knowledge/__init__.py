"""knowledge: what each technique is, when it helps, when it hurts, and the figures behind it."""
