"""gRPC beside HTTP: one service over any ASGI app of the HTTP API. Needs the extra [grpc]."""
