"""simulate: the real scheduler and KV pool under a clock that a step-time model moves."""
