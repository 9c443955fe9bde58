"""A server's part in a fleet: the feed of its load and cache, and streams that a peer can continue."""
