"""The gRPC port of the gateway. Every worker listens on it, and the kernel shares out the connections.

The supervisor holds the port without listening, so that it stays the gateway's while workers are replaced.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ridgeline.gateway.gateway_config import GatewayConfig
from ridgeline.gateway.settings import GatewaySettings
from ridgeline.options import OptionError
from ridgeline.web.grpc.extra import check_port, port_taken, require_grpc

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ridgeline.web.grpc.listener import GrpcServer

Reread = Callable[[], GatewaySettings]


@contextlib.contextmanager
def held_grpc_port(settings: GatewaySettings, reread: Reread) -> Iterator[tuple[GatewaySettings, Reread]]:
    """The settings, now and when they are read again, with the port in place of 0."""
    gateway = settings.gateway
    if gateway.grpc_port is None:
        yield settings, reread
        return
    require_grpc("[gateway] grpc_port")
    if not hasattr(socket, "SO_REUSEPORT"):
        raise OptionError("[gateway] grpc_port: this system cannot share a port between processes")
    check_port(gateway.host, gateway.grpc_port)
    family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((gateway.host, gateway.grpc_port))
        except OSError as error:
            raise port_taken(gateway.host, gateway.grpc_port, str(error)) from error
        asked, port = gateway.grpc_port, holder.getsockname()[1]

        def with_port(read: GatewaySettings) -> GatewaySettings:
            if read.gateway.grpc_port != asked:
                return read  # changed: a reload refuses it
            return replace(read, gateway=replace(read.gateway, grpc_port=port))

        yield with_port(settings), lambda: with_port(reread())


def grpc_server(app: ASGIApp, gateway: GatewayConfig, connections: int) -> GrpcServer:
    """connections: of HTTP that this worker accepts; it bounds the concurrent RPCs too."""
    from ridgeline.web.grpc.listener import GrpcServer, RpcLimits

    limits = RpcLimits(gateway.max_body_bytes, gateway.max_head_bytes, connections)
    return GrpcServer(app, limits, gateway.ssl_certfile, gateway.ssl_keyfile)
