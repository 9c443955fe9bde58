"""A worker: one process that answers. Started by the supervisor, which hands it the listening socket.

`python -m ridgeline.gateway.worker --listener FD --number N` reads its settings from standard input, says
`ready` on standard output, and serves until SIGTERM or until standard input ends: a worker whose supervisor
has died drains and leaves.
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
from pathlib import Path

from ridgeline.gateway.accounting.errors import LedgerError
from ridgeline.gateway.app import Gateway
from ridgeline.gateway.assembly import Assembly
from ridgeline.gateway.config import GatewaySettings, from_json
from ridgeline.gateway.connection_limits import connection_limits
from ridgeline.gateway.internal import InternalApp, internal_path
from ridgeline.gateway.tenants.errors import StoreError
from ridgeline.options import OptionError
from ridgeline.telemetry import logs
from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.listener import HttpServer
from ridgeline.web.tls import certificate

log = logging.getLogger("ridgeline.gateway")

POLL_S = 0.05
LAST_ROWS_S = 10.0  # for the ledger to take over what has ended


def main() -> None:
    # numpy's product of a vector with the examples of a route takes a millisecond; threads that wait for the
    # next one in a loop would take the cores from whoever makes the vectors.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parser = argparse.ArgumentParser()
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    arguments = parser.parse_args()
    settings = from_json(sys.stdin.buffer.readline())
    gateway = settings.gateway
    logs.setup(gateway.log_level, gateway.log_format)
    listener = socket.socket(fileno=arguments.listener)
    listener.setblocking(False)
    try:
        if sys.platform != "win32":
            import uvloop

            uvloop.run(work(settings, listener, arguments.number))
        else:
            asyncio.run(work(settings, listener, arguments.number))
    except KeyboardInterrupt:
        pass
    except (OptionError, StoreError, LedgerError) as error:  # each says what to do
        log.error("the worker cannot start: %s", error)
        sys.exit(1)


async def work(settings: GatewaySettings, listener: socket.socket, number: int) -> None:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    lifeline = asyncio.create_task(_end_of_input(stop))
    assembly = await Assembly.make(settings, number)
    parts = assembly.parts
    parts.offload.start()
    app = Gateway(parts)
    gateway = settings.gateway
    shown = certificate(gateway.ssl_certfile, gateway.ssl_keyfile, "[gateway] ")
    http = HttpServer(app, connection_limits(gateway), certificate=shown)
    inside = HttpServer(InternalApp(assembly), ConnectionLimits(64 << 10, 10.0, 64, None))
    internal = _internal_socket(settings.state_dir, number)
    serving = [
        asyncio.create_task(http.serve(sockets=[listener])),
        asyncio.create_task(inside.serve(sockets=[internal])),
    ]
    while not (http.started and inside.started):
        await asyncio.sleep(POLL_S / 10)
    # What was imported and made at start is never garbage; to look through it again would cost requests.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    try:
        await stop.wait()
        parts.draining = True
        for server in http.servers:
            server.close()
        until = time.monotonic() + gateway.drain_s
        while parts.deadlines.live and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
        if parts.deadlines.live:
            log.warning(
                "requests were cut at the end of the drain", extra={"count": len(parts.deadlines.live)}
            )
    finally:
        http.should_exit = inside.should_exit = True
        await asyncio.gather(*serving, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(app.drained(), LAST_ROWS_S)
        await assembly.close()
        lifeline.cancel()


def _internal_socket(state_dir: Path, number: int) -> socket.socket:
    """Where the supervisor asks this worker for its figures. The folder is its owner's alone."""
    path = internal_path(state_dir, number)
    path.unlink(missing_ok=True)
    internal = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    internal.bind(str(path))
    internal.setblocking(False)
    return internal


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # Ctrl-C reaches the whole group; the supervisor alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


async def _end_of_input(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", closefd=False)
    )
    while await reader.read(4096):
        pass
    stop.set()


if __name__ == "__main__":
    main()
