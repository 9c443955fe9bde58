"""GrpcServer: a port with the Inference service, health and reflection, over an app of the HTTP API.

Made by the server, the gateway's workers and the fleet's routers, in the event loop that runs the app.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's lines on standard error do not have our log's format

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from ridgeline.web.grpc import health
from ridgeline.web.grpc.extra import port_taken
from ridgeline.web.grpc.health import Health
from ridgeline.web.grpc.service import SERVICE, Inference
from ridgeline.web.grpc.v1 import inference_pb2_grpc

LONGEST_DRAIN_S = 86_400.0
LAST_RECORDS_S = 5.0  # seconds for the requests of ended RPCs to be recorded
KEEPALIVE_S = 60.0  # between pings of an idle connection; a connection without an answer is closed


@dataclass(frozen=True, slots=True)
class RpcLimits:
    message_bytes: int  # largest message of a request
    metadata_bytes: int
    concurrent: int  # concurrent RPCs; further ones get RESOURCE_EXHAUSTED


class GrpcServer:
    def __init__(
        self, app: ASGIApp, limits: RpcLimits, certfile: Path | None = None, keyfile: Path | None = None
    ) -> None:
        self._inference = Inference(app)
        self._health = Health(app, frozenset({SERVICE, health.NAME}))
        self._limits = limits
        self._files = None if certfile is None else _PemFiles(certfile, keyfile or certfile)
        self._server: Any = None
        self._draining: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int, shared: bool = False) -> None:
        """Listen; port 0 picks a free one. shared: other processes of this user listen on it too."""
        server = grpc.aio.server(
            options=self._options(shared), maximum_concurrent_rpcs=self._limits.concurrent
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.NAME, reflection.SERVICE_NAME), server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._files is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, self._files.credentials())
        except RuntimeError as error:
            raise port_taken(host, port, str(error)) from None
        if not self.port:
            raise port_taken(host, port, "it is in use, or no address of this machine")
        await server.start()
        self._server = server

    def drain(self) -> None:
        """Accept no further connection or RPC; running ones continue until `stop`."""
        self._health.stop()
        if self._server is not None and self._draining is None:
            self._draining = asyncio.create_task(self._server.stop(LONGEST_DRAIN_S))

    async def stop(self, grace_s: float) -> None:
        """Accept no further RPC; running ones have `grace_s`, then they are cancelled."""
        self.drain()
        if self._server is not None:
            await self._server.stop(grace_s)
            await self._inference.ended(LAST_RECORDS_S)

    def _options(self, shared: bool) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self._limits.message_bytes),
            ("grpc.max_metadata_size", self._limits.metadata_bytes),
            ("grpc.absolute_max_metadata_size", self._limits.metadata_bytes),
            ("grpc.so_reuseport", int(shared)),
            ("grpc.keepalive_time_ms", int(1000 * KEEPALIVE_S)),
        ]


class _PemFiles:
    """Credentials from the certificate's files, which every handshake reads if they have changed."""

    def __init__(self, certfile: Path, keyfile: Path) -> None:
        self._paths = (certfile.expanduser(), keyfile.expanduser())
        self._read = self._pair()

    def credentials(self) -> Any:
        return grpc.dynamic_ssl_server_credentials(_configuration(self._read), self._changed)

    def _changed(self) -> Any:
        """A new configuration, or None to keep the last one. gRPC's threads call it."""
        try:
            pair = self._pair()
        except OSError:
            return None  # the files are being replaced
        if pair == self._read:
            return None
        self._read = pair
        return _configuration(pair)

    def _pair(self) -> tuple[bytes, bytes]:
        certificate, key = (path.read_bytes() for path in self._paths)
        return certificate, key


def _configuration(pair: tuple[bytes, bytes]) -> Any:
    certificate, key = pair
    return grpc.ssl_server_certificate_configuration([(key, certificate)])
