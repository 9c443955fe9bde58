"""The engine process and its messages with the front, over a local socket."""
