"""The protocol between a server and a fleet: load, prefix events, resume markers. It imports neither."""
