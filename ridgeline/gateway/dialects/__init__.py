"""OpenAI and Anthropic: what a body says, translated, and what it used."""
