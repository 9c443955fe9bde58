"""`ridgeline serve` as a process: which models, the engine under supervision, start, drain, exit."""
