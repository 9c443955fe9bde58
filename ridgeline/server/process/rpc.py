"""The gRPC port of `ridgeline serve`: the same app behind another protocol. Off unless grpc_port is set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.server.config import ServerConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ridgeline.web.grpc.listener import GrpcServer


def grpc_server(app: ASGIApp, config: ServerConfig) -> GrpcServer:
    from ridgeline.web.grpc.listener import GrpcServer, RpcLimits

    limits = RpcLimits(config.max_body_bytes, config.max_head_bytes, config.max_connections)
    return GrpcServer(app, limits, config.ssl_certfile, config.ssl_keyfile)


async def started_grpc(app: ASGIApp, config: ServerConfig) -> GrpcServer | None:
    """Listening; None if grpc_port is not set."""
    if config.grpc_port is None:
        return None
    server = grpc_server(app, config)
    await server.start(config.host, config.grpc_port)
    return server
