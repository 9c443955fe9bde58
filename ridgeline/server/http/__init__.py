"""One HTTP request: the gate, its context, decoding of bodies within bounds, WebSockets."""
