"""Chooses the replica that answers a request. Pure logic: no I/O; the caller passes the time."""
