"""One replica's HTTP face: OpenAI endpoints, validation, SSE, health, metrics, engine supervision."""
