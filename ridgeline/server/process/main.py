"""`ridgeline serve`: bind the port, start the engine, print the start-up budget, serve, drain, exit.

The only place that knows both the HTTP app and the engine's supervisor, and the only one with signal
handlers. The HTTP stack is imported after the engine process has been started, so that both load
concurrently.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgeline import __version__
from ridgeline.engine.errors import EngineError
from ridgeline.options import OptionError
from ridgeline.running import SetState, announced
from ridgeline.server.config import ServerConfig
from ridgeline.server.process.errors import PortTaken
from ridgeline.server.process.rpc import started_grpc
from ridgeline.server.process.setup import ModelSetup, sharing_memory
from ridgeline.server.process.startup_text import serving_line, since_process_start, startup_lines
from ridgeline.server.process.supervisor import Supervisor
from ridgeline.server.process.weights import ReadyFiles, ready_files
from ridgeline.server.records.state import StateStore, open_state
from ridgeline.telemetry import logs
from ridgeline.telemetry.traces import require_exporter
from ridgeline.web.grpc.extra import check_port, require_grpc
from ridgeline.web.hosts import is_loopback
from ridgeline.web.open_files import allow_open_files
from ridgeline.web.tls import certificate

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ridgeline.server.batches.runner import BatchRunner
    from ridgeline.server.served_models import Model, ServedModels
    from ridgeline.server.vector_stores.service import VectorStores
    from ridgeline.web.grpc.listener import GrpcServer
    from ridgeline.web.listener import HttpServer

log = logging.getLogger("ridgeline.server")

OTHER_FILES = 256  # open files other than connections
SEND_BUFFER_BYTES = 128 << 10
LAST_RPCS_S = 3.0  # for RPCs to end with the error of a stopped engine
LAST_WRITE_S = 5.0  # for ended background responses to reach the disk


@dataclass(frozen=True, slots=True)
class Supervised:
    """One model with the supervisor of its engine."""

    setup: ModelSetup
    supervisor: Supervisor
    files: ReadyFiles
    begun_s: float = 0.0  # seconds from the start of this process to that of the engine's

    def for_handlers(self) -> Model:
        """The model as handlers see it, with metrics fed by the supervisor."""
        from ridgeline.server.served_models import Model, ModelFiles
        from ridgeline.telemetry.metrics import ServerMetrics

        supervisor = self.supervisor
        metrics = ServerMetrics(self.setup.names[0])
        # The client is still the dead engine's: add its last counters to the totals.
        supervisor.on_restart = lambda: metrics.engine_restarted(
            supervisor.client.stats if supervisor.client is not None else None
        )
        supervisor.on_start = lambda client: metrics.engine_started(client.hello.seconds, client.hello.bytes)
        fetching = self.files.segments
        segments = {"process": self.begun_s - sum(fetching.values()), **fetching}
        engine = self.setup.engine
        files = ModelFiles(engine.model, self.files.path, engine, self.files.weights)
        return Model(self.setup.names, supervisor, metrics, self.setup.other_names, segments, files)

    def startup_lines(self) -> str:
        client, name = self.supervisor.client, self.setup.names[0]
        if client is None:  # it died while others were still starting
            return f"ridgeline {__version__} · {name} · its engine died and is being restarted"
        return startup_lines(client, name)

    def startup_fields(self) -> dict[str, Any]:
        """The start-up lines as log fields."""
        client = self.supervisor.client
        if client is None:
            return {"names": self.setup.names}
        hello = client.hello
        return {
            "names": self.setup.names,
            "backend": hello.backend,
            "notes": hello.notes,
            "context": hello.max_context,
            "kv_tokens": hello.kv_tokens,
            "start_s": hello.seconds,
            "bytes": hello.bytes,
            "limits": hello.limits,
            "sampling": hello.sampling.values(),
        }


def check(server: ServerConfig) -> None:
    """Before a model is fetched: raise OptionError for invalid settings, warn about a public server without
    keys.
    """
    if server.otlp_endpoint is not None:
        require_exporter()
    if server.grpc_port is not None:
        require_grpc("--grpc-port")
        check_port(server.host, server.grpc_port)
    certificate(server.ssl_certfile, server.ssl_keyfile)
    server.accepted_keys()
    if not server.needs_key and not is_loopback(server.host):
        log.warning(
            "listening on %s without API keys: every machine that reaches this address can use the server; "
            "set --api-keys or --api-key-file, or listen on 127.0.0.1",
            server.host,
        )


def serve(models: Sequence[ModelSetup], server: ServerConfig) -> int:
    """Serve until told to stop; logging is set up and settings are checked. Returns the exit code."""
    allow_open_files(server.max_connections + OTHER_FILES)
    listener = _bind(server)
    state = open_state(server.state_dir, server.port)
    try:
        files = [ready_files(setup, server) for setup in models]
        shares = sharing_memory(models, [ready.path for ready in files])
        supervised = [
            Supervised(setup, Supervisor(setup.engine, ready.path, server), ready, since_process_start())
            for setup, ready in zip(shares, files, strict=True)
        ]
        names = [name for setup in models for name in setup.names]
        sources = [setup.engine.model for setup in models]
        with announced("server", _url(listener.getsockname(), server), names, sources) as set_state:
            serving = _serve(supervised, server, state, listener, set_state)
            if sys.platform != "win32":
                import uvloop

                return uvloop.run(serving)
            return asyncio.run(serving)
    finally:
        state.close()


async def _serve(
    models: Sequence[Supervised],
    server: ServerConfig,
    state: StateStore,
    listener: socket.socket,
    set_state: SetState,
) -> int:
    supervisors = [model.supervisor for model in models]
    stop = asyncio.Event()
    _on_signals(stop, supervisors)
    http: HttpServer | None = None
    rpc: GrpcServer | None = None
    serving: asyncio.Task[None] | None = None
    served_models: ServedModels | None = None
    try:
        with gc_paused():
            await asyncio.gather(*(supervisor.begin() for supervisor in supervisors))
            served_models = _served_models(models, server, state)
            http, app = _http_server(served_models)
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            rpc = await started_grpc(app, server)
            starting = asyncio.create_task(_start_all(supervisors))
            await _prepare(supervisors, server)
            told_to_stop = asyncio.create_task(stop.wait())
            await asyncio.wait([starting, told_to_stop], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            _say_ready(models, _url(listener.getsockname(), server), rpc)
            set_state("ready")
            batches = await _resume_batches(served_models, app)
            vector_stores = await _resume_ingest(served_models)
            await stop.wait()
            set_state("stopping")
            await batches.stop()  # first: no client waits for their lines, and they are sent again later
            await vector_stores.pause()  # what is not done is in its journal
            await _drain(supervisors, server.drain_s)
        else:
            starting.cancel()
            await asyncio.wait([starting])
    except (EngineError, OptionError) as error:  # OptionError: the gRPC port was taken meanwhile
        logs.fail(f"ridgeline: {error}")
        return 1
    finally:
        await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
        if rpc is not None:
            await rpc.stop(LAST_RPCS_S)
        if http is not None and serving is not None:
            http.should_exit = True
            await serving
        if served_models is not None:
            await _finish_background_responses(served_models)
            await _close_vector_stores(served_models)
            if served_models.recorder is not None:
                served_models.recorder.close()
            if served_models.tracing is not None:
                served_models.tracing.close()
    return 0


def _say_ready(models: Sequence[Supervised], url: str, rpc: GrpcServer | None) -> None:
    lines = [*(model.startup_lines() for model in models), serving_line(url)]
    told = {}
    if rpc is not None:
        told["grpc_port"] = rpc.port
        lines.append(f"  gRPC     port {rpc.port}")
    logs.say(
        "\n".join(lines),
        "serving",
        version=__version__,
        url=url,
        models=[model.startup_fields() for model in models],
        **told,
    )


async def _prepare(supervisors: Sequence[Supervisor], server: ServerConfig) -> None:
    """What the first requests would wait for, computed while the engines load."""
    from ridgeline.server.answering.thinking import prepare_tags

    for supervisor in supervisors:
        await asyncio.to_thread(prepare_tags, supervisor.tokenizer, server)


async def _start_all(supervisors: Sequence[Supervisor]) -> None:
    """If one engine cannot start, the whole service ends: no partial service."""
    starts = [asyncio.create_task(supervisor.start()) for supervisor in supervisors]
    try:
        await asyncio.gather(*starts)
    finally:
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection during start-up. Nearly all objects made then stay alive; they are frozen, so
    that later collections skip them and do not delay streams.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _served_models(models: Sequence[Supervised], server: ServerConfig, state: StateStore) -> ServedModels:
    from ridgeline.server.answering.model_formats import check_parsers
    from ridgeline.server.served_models import ServedModels

    check_parsers(server)
    served_models = ServedModels(server, [model.for_handlers() for model in models], state)
    if server.record_traffic is not None:
        from ridgeline.server.records.recording import TrafficRecorder

        served_models.recorder = TrafficRecorder(
            server.record_traffic.expanduser(), server.record_traffic_bytes, server.record_texts
        )
    if server.otlp_endpoint is not None:
        from ridgeline.server.records.tracing import Tracing

        served_models.tracing = Tracing(server)
    return served_models


def _http_server(served_models: ServedModels) -> tuple[HttpServer, ASGIApp]:
    """The HTTP server over all models."""
    from ridgeline.server.app import app_over

    app = app_over(served_models)
    return http_server(app, served_models.config), app


def http_server(app: ASGIApp, config: ServerConfig) -> HttpServer:
    """The listener for this app, with the limits of the config."""
    from ridgeline.web.connection import ConnectionLimits
    from ridgeline.web.listener import HttpServer

    limits = ConnectionLimits(
        config.max_head_bytes,
        config.head_timeout_s,
        config.max_connections,
        config.max_connections_per_address,
    )
    # A WebSocket's message is a body.
    shown = certificate(config.ssl_certfile, config.ssl_keyfile)
    return HttpServer(app, limits, config.max_body_bytes, config.websocket_ping_s, shown)


async def _resume_batches(served_models: ServedModels, app: ASGIApp) -> BatchRunner:
    """Resume the batches of the last server. Twice the running capacity, so that some lines always wait."""
    from ridgeline.server.batches.endpoints import Batches

    clients = [model.engine.client for model in served_models.models if model.engine.client is not None]
    in_flight = 2 * sum(client.hello.max_running for client in clients)
    keys = served_models.config.accepted_keys()
    runner = served_models.part(Batches).runner
    await runner.start(app, keys[0] if keys else None, max(in_flight, 1))
    return runner


async def _resume_ingest(served_models: ServedModels) -> VectorStores:
    """Go on with the files that the last server was making searchable."""
    from ridgeline.server.vector_stores.service import VectorStores

    vector_stores = served_models.part(VectorStores)
    await vector_stores.resume()
    return vector_stores


async def _close_vector_stores(served_models: ServedModels) -> None:
    from ridgeline.server.vector_stores.service import VectorStores

    await served_models.part(VectorStores).stop()


async def _finish_background_responses(served_models: ServedModels) -> None:
    """Wait until background responses have ended, with or without an answer, and are written."""
    from ridgeline.server.responses_api.handlers import Responses

    await served_models.part(Responses).background.ended(LAST_WRITE_S)


async def _drain(supervisors: Sequence[Supervisor], drain_s: float) -> None:
    """Accept nothing new; finish accepted requests up to the deadline, then end the rest with an error."""
    for supervisor in supervisors:
        supervisor.draining = True
    deadline = time.monotonic() + drain_s
    if open_requests := _open_requests(supervisors):
        log.info("draining: %d requests open, at most %.0f s", open_requests, drain_s)
        while _open_requests(supervisors) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if open_requests := _open_requests(supervisors):
            log.warning("drain deadline passed: %d requests are ended with an error", open_requests)


def _open_requests(supervisors: Sequence[Supervisor]) -> int:
    """Open requests of living engines."""
    clients = [supervisor.client for supervisor in supervisors if supervisor.client is not None]
    return sum(client.open_requests for client in clients if not client.closed.is_set())


def _on_signals(stop: asyncio.Event, supervisors: Sequence[Supervisor]) -> None:
    loop = asyncio.get_running_loop()

    def told(number: signal.Signals) -> None:
        if stop.is_set():  # second signal: exit without draining
            for supervisor in supervisors:
                supervisor.abandon()
            os._exit(128 + number)
        log.info("%s: stopping", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)


def _bind(server: ServerConfig) -> socket.socket:
    """Bound before anything is loaded, so that a taken port is reported at once."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The kernel would buffer megabytes for a client that stopped reading, and hide it for minutes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind((server.host, server.port))
    except (OSError, OverflowError) as error:  # in use, not a local address, or an invalid port
        listener.close()
        raise PortTaken(
            f"cannot listen on {server.host}:{server.port}: {error}; choose another with --port"
        ) from error
    listener.listen(1024)
    return listener


def _url(address: tuple[Any, ...], server: ServerConfig) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{'http' if server.ssl_certfile is None else 'https'}://{host}:{address[1]}"
