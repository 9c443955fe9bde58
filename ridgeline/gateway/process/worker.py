"""A worker: one process that serves requests. The supervisor starts it and passes the listening socket.

`python -m ridgeline.gateway.process.worker --listener FD --number N` and the supervisor exchange lines:

    supervisor, on standard input     the settings; `serve`; `drain [PATH]`, with the successor's socket
    worker, on standard output        `ready` or `refused REASON`; `serving`; `handed`, when the successor
                                      has the limits; `leaving`, on SIGTERM: asks for a successor

A worker whose standard input ends has lost its supervisor: it drains and exits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.gateway.accounting.errors import LedgerError
from ridgeline.gateway.errors import shutting_down
from ridgeline.gateway.limits.handover_limiter import HandoverLimiter
from ridgeline.gateway.pipeline.app import Gateway
from ridgeline.gateway.process.assembly import Assembly
from ridgeline.gateway.process.connection_limits import connection_limits
from ridgeline.gateway.process.internal import InternalApp, internal_path, limits_path
from ridgeline.gateway.process.rpc import grpc_server
from ridgeline.gateway.settings import GatewaySettings, from_json
from ridgeline.gateway.tenants.errors import StoreError
from ridgeline.options import OptionError
from ridgeline.telemetry import logs
from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.listener import HttpServer
from ridgeline.web.private_socket import listen_private
from ridgeline.web.tls import certificate

if TYPE_CHECKING:
    from ridgeline.web.grpc.listener import GrpcServer

log = logging.getLogger("ridgeline.gateway")

POLL_S = 0.02
IDLE_S = 1.0  # an idle connection stays open for this time when the gateway stops …
REPLACED_IDLE_S = 5.0  # … and when another worker has replaced this one
LAST_WORDS_S = 5.0  # for streams that are ended to send their error event
LAST_RPCS_S = 3.0  # for RPCs to end after their requests
LAST_ROWS_S = 10.0  # for the ledger to store finished requests
REPLACED_S = 180.0  # after SIGTERM, for the supervisor to start another worker


def main() -> None:
    # numpy's product of a vector with the examples of a route takes 1 ms; threads that spin until the next
    # one would take the cores from the embedding server.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parser = argparse.ArgumentParser()
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    arguments = parser.parse_args()
    with os.fdopen(0, "rb", buffering=0, closefd=False) as line:  # nothing after it is read ahead
        settings = from_json(line.readline())
    gateway = settings.gateway
    logs.setup(gateway.log_level, gateway.log_format)
    _keep_descriptors()
    listener = socket.socket(fileno=arguments.listener)
    listener.setblocking(False)
    worker = Worker(settings, listener, arguments.number)
    try:
        if sys.platform != "win32":
            import uvloop

            uvloop.run(worker.run())
        else:
            asyncio.run(worker.run())
    except KeyboardInterrupt:
        pass
    except (OptionError, StoreError, LedgerError) as error:  # each message says what to do
        _tell(f"refused {' '.join(str(error).split())}")
        log.error("the worker cannot start: %s", error)
        sys.exit(1)


def _keep_descriptors() -> None:
    """Child processes must not inherit the worker's sockets: one with the listener would keep the port open.
    uvloop leaves inherited descriptors open in them.
    """
    for name in os.listdir("/dev/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own
                os.set_inheritable(int(name), False)


class Worker:
    def __init__(self, settings: GatewaySettings, listener: socket.socket, number: int) -> None:
        self._settings, self._listener, self._number = settings, listener, number
        self._name = f"{number}-{os.getpid()}"
        self._may_serve, self._stop = asyncio.Event(), asyncio.Event()
        self._successor: Path | None = None
        self._rpc: GrpcServer | None = None

    async def run(self) -> None:
        _on_sigterm(self._leave)
        listening = asyncio.create_task(self._listen_to_supervisor())
        settings = self._settings
        assembly = await Assembly.make(settings, self._number)
        parts = assembly.parts
        parts.offload.start()
        self._app, self._assembly = Gateway(parts, assembly.batches), assembly
        gateway = settings.gateway
        shown = certificate(gateway.ssl_certfile, gateway.ssl_keyfile, "[gateway] ")
        accepted = connection_limits(gateway)
        self._http = HttpServer(self._app, accepted, certificate=shown)
        if gateway.grpc_port is not None:
            self._rpc = grpc_server(self._app, gateway, accepted.connections)
        inside = HttpServer(InternalApp(assembly), ConnectionLimits(64 << 10, 10.0, 64, None))
        serving = [await _started(inside, listen_private(internal_path(settings.state_dir, self._name)))]
        if isinstance(parts.limiter, HandoverLimiter):
            await parts.limiter.listen(limits_path(settings.state_dir, self._name))
        # Objects made at the start stay alive: scanning them in every collection would delay requests.
        gc.collect()
        gc.freeze()
        _tell("ready")
        try:
            await self._may_serve.wait()
            if not self._stop.is_set():
                if self._number == 0:
                    await assembly.start_booking()
                serving.append(await _started(self._http, self._listener))
                if self._rpc is not None and gateway.grpc_port is not None:
                    await self._rpc.start(gateway.host, gateway.grpc_port, shared=True)
                _tell("serving")
                await self._stop.wait()
                await self._drain()
        finally:
            self._http.should_exit = inside.should_exit = True
            if self._rpc is not None:
                await self._rpc.stop(LAST_RPCS_S)
            await asyncio.gather(*serving, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._app.drained(), LAST_ROWS_S)
            await assembly.close()
            listening.cancel()

    async def _drain(self) -> None:
        """Stop accepting, hand over the limits, finish running requests; then end the rest."""
        parts = self._assembly.parts
        parts.draining = True
        self._http.drain(IDLE_S if self._successor is None else REPLACED_IDLE_S)
        if self._rpc is not None:
            self._rpc.drain()
        await self._assembly.stop_booking()
        limiter = parts.limiter if isinstance(parts.limiter, HandoverLimiter) else None
        if limiter is not None and self._successor is not None:
            try:
                await limiter.hand_over(self._successor)
            except (OSError, EOFError, TimeoutError) as error:
                log.error(
                    "limits were not handed over; their windows start empty", extra={"cause": str(error)}
                )
        _tell("handed")
        until = time.monotonic() + self._settings.gateway.drain_s
        while time.monotonic() < until:
            if not (self._http.connections or parts.deadlines.live or (limiter and limiter.predecessors)):
                return
            await asyncio.sleep(POLL_S)
        if parts.deadlines.live:
            log.warning(
                "ending requests that did not finish within drain_s",
                extra={"count": len(parts.deadlines.live)},
            )
            parts.deadlines.end_all(shutting_down())
            until = time.monotonic() + LAST_WORDS_S
            while parts.deadlines.live and time.monotonic() < until:
                await asyncio.sleep(POLL_S)

    # ---- the supervisor's commands ----

    async def _listen_to_supervisor(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", closefd=False)
        )
        while line := (await reader.readline()).decode().strip():
            word, _, rest = line.partition(" ")
            if word == "serve":
                self._may_serve.set()
            elif word == "drain":
                self._successor = Path(rest) if rest else None
                break
        self._stop.set()
        self._may_serve.set()

    def _leave(self) -> None:
        """SIGTERM: ask for a successor, and serve until it is ready."""
        _tell("leaving")

        def alone() -> None:
            self._stop.set()
            self._may_serve.set()

        asyncio.get_running_loop().call_later(REPLACED_S, alone)


async def _started(server: HttpServer, listener: socket.socket) -> asyncio.Task[None]:
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.001)
    return task


def _tell(line: str) -> None:
    """Tell the supervisor, if it is still running."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def _on_sigterm(leave: Callable[[], None]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
    # Ctrl-C reaches the whole process group; only the supervisor acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
