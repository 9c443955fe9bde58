"""What the server keeps of requests: its state on disk, recorded traffic, spans, usage by request id."""
