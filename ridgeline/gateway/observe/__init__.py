"""What operators see: metrics, traces, the access log."""
