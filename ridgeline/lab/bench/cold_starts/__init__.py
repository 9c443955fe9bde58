"""Cold starts of a server, timed segment by segment."""
