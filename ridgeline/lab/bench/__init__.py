"""bench: sends load to a server with OpenAI's API and computes exactly defined metrics."""
