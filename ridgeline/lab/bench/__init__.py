"""bench: load on a server that speaks OpenAI's API, and what came of it, exactly as defined."""
