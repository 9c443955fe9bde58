"""HTTP code shared by the server and the gateway: listener, TLS, connection limits, host checks."""
