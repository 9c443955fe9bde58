"""HTTP parts of a proxy: client, connection pool, breaker, health, retry budget, fair queue, relay."""
