"""The engine process and its messages with the server process, over a local socket."""
