"""What the routers of a fleet show of themselves."""
