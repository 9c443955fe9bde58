"""One HTTP request: the gate, its exchange, decoding of bodies within bounds, WebSockets."""
