"""What the server stores about requests: state on disk, recorded traffic, spans, usage by request id."""
