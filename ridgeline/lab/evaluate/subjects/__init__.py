"""What answers: an engine in this process, or a server."""
