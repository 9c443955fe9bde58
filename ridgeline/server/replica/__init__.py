"""What a server offers to a fleet: the feed of its load and cache, and streams that a peer can continue."""
