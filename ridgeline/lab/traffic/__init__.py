"""Traffic: which requests come when, read from traces or drawn from distributions."""
