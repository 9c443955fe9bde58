"""One request through the gateway: app, checks, limits, routing, forwarding, relaying, the ledger row."""
