"""`ridgeline serve`: bind the port, start the engine, print where the start went, serve, drain, leave.

The only place that knows both the HTTP app and the engine's supervisor, and the only one with signals. The
HTTP stack is imported after the engine process is on its way, so that the two load side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline import __version__
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import EngineError
from ridgeline.engine.memory_receipt import receipt_of
from ridgeline.models.pull import ensure
from ridgeline.server.config import ServerConfig
from ridgeline.server.supervisor import Supervisor
from ridgeline.telemetry import logs

if TYPE_CHECKING:
    from ridgeline.engine.client import AsyncClient
    from ridgeline.server.http import HttpServer

log = logging.getLogger("ridgeline.server")

GIB = 1 << 30
SEND_BUFFER_BYTES = 128 << 10


def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until told to stop. Returns the exit code."""
    logs.setup(server.log_level, server.log_format)
    listener = _bind(server)
    path = ensure(engine.model).path
    if sys.platform != "win32":
        import uvloop

        return uvloop.run(_serve(engine, server, path, listener))
    return asyncio.run(_serve(engine, server, path, listener))


async def _serve(engine: EngineConfig, server: ServerConfig, path: Path, listener: socket.socket) -> int:
    supervisor = Supervisor(engine, path, server)
    stop = asyncio.Event()
    _on_signals(stop, supervisor)
    http: HttpServer | None = None
    serving: asyncio.Task[None] | None = None
    try:
        with garbage_not_looked_for():
            await supervisor.begin()
            http = _http_server(engine, server, supervisor)
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            starting = asyncio.create_task(supervisor.start())
            told_to_stop = asyncio.create_task(stop.wait())
            await asyncio.wait([starting, told_to_stop], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            assert supervisor.client is not None
            print(startup_lines(supervisor.client, engine, listener.getsockname()), flush=True)
            await stop.wait()
            await _drain(supervisor, server.drain_s)
        else:
            starting.cancel()
            await asyncio.wait([starting])
    except EngineError as error:
        print(f"ridgeline: {error}", file=sys.stderr)
        return 1
    finally:
        await supervisor.stop()
        if http is not None and serving is not None:
            http.should_exit = True
            await serving
    return 0


@contextlib.contextmanager
def garbage_not_looked_for() -> Iterator[None]:
    """For a start. Nearly all that it makes stays: looking through it again and again finds nothing, neither
    now nor later, when it would hold up every stream.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _http_server(engine: EngineConfig, server: ServerConfig, supervisor: Supervisor) -> HttpServer:
    """The HTTP face with its figures, fed by what the supervisor learns of its engines."""
    from ridgeline.server.app import build_app
    from ridgeline.server.http import HttpServer
    from ridgeline.telemetry.metrics import ServerMetrics

    names = server.served_model_name or (public_name(engine.model),)
    metrics = ServerMetrics(names[0])
    # The client is still the dead engine's: its last figures go into the totals.
    supervisor.on_restart = lambda: metrics.engine_restarted(
        supervisor.client.stats if supervisor.client is not None else None
    )
    supervisor.on_start = lambda client: metrics.engine_started(client.hello.seconds, client.hello.bytes)
    return HttpServer(build_app(server, supervisor, metrics, names))


async def _drain(supervisor: Supervisor, drain_s: float) -> None:
    """Nothing new is taken; what was accepted is finished, up to the deadline, and the rest is told."""
    supervisor.draining = True
    client = supervisor.client
    deadline = time.monotonic() + drain_s
    if client is not None and client.open_requests:
        log.info("draining: %d requests open, at most %.0f s", client.open_requests, drain_s)
        while client.open_requests and not client.closed.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if client.open_requests and not client.closed.is_set():
            log.warning("drain deadline passed: %d requests are ended with an error", client.open_requests)


def _on_signals(stop: asyncio.Event, supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()

    def told(number: signal.Signals) -> None:
        if stop.is_set():  # told twice: the user does not want to wait
            supervisor.abandon()
            os._exit(128 + number)
        log.info("%s: stopping", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)


def _bind(server: ServerConfig) -> socket.socket:
    """Bound before anything is loaded: a taken port is said at once."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The kernel would buffer megabytes for a reader that has stopped, and hide it for minutes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind((server.host, server.port))
    except (OSError, OverflowError) as error:  # taken, not ours, or no port at all
        listener.close()
        raise PortTaken(
            f"cannot listen on {server.host}:{server.port}: {error}; choose another with --port"
        ) from error
    listener.listen(1024)
    return listener


class PortTaken(EngineError):
    """The address to serve on is not to be had."""


def public_name(model: str) -> str:
    """What clients call the model: its short name or hub id, or the name of its file or directory."""
    path = Path(model)
    if model.startswith("hf:"):
        return model.removeprefix("hf:")
    return path.stem if path.suffix == ".gguf" else path.name or model


def startup_lines(client: AsyncClient, engine: EngineConfig, address: tuple[Any, ...]) -> str:
    """The start-up budget and the memory receipt, beside the limits of the machine."""
    hello = client.hello
    seconds = " · ".join(f"{stage} {spent:.2f}" for stage, spent in hello.seconds.items())
    limits = hello.limits
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    lines = [
        f"ridgeline {__version__} · {public_name(engine.model)} · context {hello.max_context:,}",
        f"  backend  {hello.backend}",
        *(f"           {note}" for note in hello.notes),
        f"  start    {seconds} · ready {_since_process_start():.2f} s",
        *_memory_lines(hello.bytes, hello.kv_tokens),
        f"  limits   decode {limits['decode_tokens_per_s']:.0f} tok/s for one stream "
        f"({_rate(limits['read_bytes_per_s'], 'B/s', 1)} read) · prefill "
        f"{limits['prefill_tokens_per_s']:.0f} tok/s ({_rate(limits['flops_per_s'], 'FLOP/s', 0)})",
        f"  serving  http://{host}:{address[1]}/v1 · Ctrl-C drains and stops",
    ]
    return "\n".join(lines)


def _memory_lines(sizes: dict[str, int], kv_tokens: int) -> list[str]:
    receipt = receipt_of(sizes)
    if receipt is not None:
        parts, whole = receipt.lines()
        return [f"  memory   {parts}", f"           KV cache of {kv_tokens:,} tokens · {whole}"]
    return [
        f"  memory   weights {sizes['weights'] / GIB:.2f} · KV cache {sizes['kv'] / GIB:.2f} "
        f"({kv_tokens:,} tokens) · rest {sizes['rest'] / GIB:.2f} GiB"
    ]


def _rate(per_s: float, unit: str, digits: int) -> str:
    return f"{per_s / 1e12:.2f} T{unit}" if per_s >= 1e12 else f"{per_s / 1e9:.{digits}f} G{unit}"


def _since_process_start() -> float:
    """Seconds since this process was made, interpreter start and imports included."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()
