"""The life of one replica: what the controller knows of it, asks it, and does with it."""
