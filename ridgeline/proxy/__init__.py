"""The HTTP side of a proxy: client, connection pool, breaker, health, retry budget, fair queue, relay."""
