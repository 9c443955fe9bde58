"""Answers that need not be computed again: exact, and by meaning; and how shareable prompts are."""
