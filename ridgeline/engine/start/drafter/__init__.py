"""Which drafter an engine starts with, what it takes of the memory, and its loading."""
