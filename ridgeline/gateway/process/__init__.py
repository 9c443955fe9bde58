"""`ridgeline gateway` as processes: the supervisor, its workers, and how a worker is assembled."""
