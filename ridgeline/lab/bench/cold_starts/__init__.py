"""Cold starts of a server, stamped segment by segment."""
