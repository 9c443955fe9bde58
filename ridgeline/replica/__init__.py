"""What a server and a fleet say to each other: load, prefix events, resume markers. It imports neither."""
