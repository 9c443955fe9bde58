"""What the server and the gateway share as HTTP servers: listener, TLS, connection bounds, host checks."""
