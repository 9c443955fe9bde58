"""Personal data and secrets in requests and answers: found, redacted, restored."""
