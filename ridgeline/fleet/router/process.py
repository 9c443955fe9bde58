"""A router process: `run_router` serves on a socket until SIGTERM, then drains.

The controller starts `python -m ridgeline.fleet.router.process --listener FD --control ADDRESS` and writes a
RouterConfig as one line of JSON to its standard input. Several processes may share one listening socket. A
router whose controller has ended keeps serving with the last table.
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
from typing import TYPE_CHECKING

import msgspec

from ridgeline.fleet.queueing.durable import DurableQueue
from ridgeline.fleet.queueing.journal import JournalError
from ridgeline.fleet.router.app import RouterApp
from ridgeline.fleet.router.config import RouterConfig
from ridgeline.fleet.router.durable.durable_hold import DurableHold, HoldLink
from ridgeline.fleet.router.durable.read_held import read_held
from ridgeline.fleet.router.fleet_router import FleetRouter, bearer_lines
from ridgeline.fleet.router.observe.peer_metrics import PeerMetrics
from ridgeline.options import OptionError
from ridgeline.proxy.http_client import HttpClient
from ridgeline.proxy.origin import Origin, read_url
from ridgeline.telemetry import logs
from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.listener import HttpServer
from ridgeline.web.open_files import allow_open_files
from ridgeline.web.private_socket import listen_private

if TYPE_CHECKING:
    from ridgeline.web.grpc.listener import GrpcServer

POLL_S = 0.02
IDLE_S = 1.0  # seconds for which an idle connection stays open after SIGTERM
OWNER_CONNECT_S = 5.0  # connections to the router with the journal
LAST_RPCS_S = 3.0  # seconds for RPCs to end after their requests
FILES_EACH, OTHER_FILES = 2, 512  # a request uses the client's socket and the replica's

log = logging.getLogger("ridgeline.fleet")


def control_origin(address: str | Path) -> Origin:
    """The address of a socket's path or a URL."""
    text = str(address)
    return read_url(text if "://" in text or text.startswith("unix:") else f"unix:{text}", where="control")


def router_command(listener: int, control: str | Path) -> list[str]:
    """The command of a router process. It inherits `listener` and reads its config from standard input."""
    program = [sys.executable, "-m", "ridgeline.fleet.router.process"]
    return [*program, "--listener", str(listener), "--control", str(control)]


def config_line(config: RouterConfig) -> bytes:
    return msgspec.json.encode(config) + b"\n"


def run_router(config: RouterConfig, listener: socket.socket, control: str | Path) -> None:
    """Serve until SIGTERM, then finish running requests within drain_s. control: a socket's path or a URL."""
    logs.setup(config.log_level, config.log_format)
    listener.setblocking(False)
    with contextlib.suppress(KeyboardInterrupt):
        if sys.platform != "win32":
            import uvloop

            uvloop.run(_serve(config, listener, control))
        else:
            asyncio.run(_serve(config, listener, control))


async def _serve(config: RouterConfig, listener: socket.socket, control: str | Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the controller stops the routers
    router = FleetRouter(
        control_origin(control),
        lines=bearer_lines(config.control_token),
        tuning=config.tuning,
        name=f"{config.name}-{os.getpid()}",
        region=config.region,
    )
    app = RouterApp(router, config)
    sockets = [listener]
    hold: DurableHold | None = None
    client = HttpClient()
    if config.held_dir and config.keeps_journal:
        hold = app.hold = DurableHold(
            router, open_journal(config), lambda held: read_held(held, config.request_timeout_s)
        )
        sockets.append(bind_owner(config))
    elif config.held_dir:
        app.hold = HoldLink(router, client, control_origin(owner_path(config)), OWNER_CONNECT_S)
    private = _private(app, config, client)
    files = allow_open_files(config.max_connections * FILES_EACH + OTHER_FILES)
    most = min(config.max_connections, max((files - OTHER_FILES) // FILES_EACH, 1))
    limits = ConnectionLimits(config.max_head_bytes, config.head_timeout_s, most, None)
    server = HttpServer(app, limits)
    router.start()
    if hold is not None:
        hold.start()
    rpc = await _started_grpc(app, config, most)
    serving = asyncio.create_task(server.serve(sockets=sockets))
    telling = None if private is None else asyncio.create_task(private[0].serve(sockets=[private[1]]))
    gc.freeze()
    try:
        await asyncio.wait([serving, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        app.is_draining = True
        server.drain(IDLE_S)
        if rpc is not None:
            rpc.drain()
        until = time.monotonic() + config.drain_s
        while (app.live or server.connections) and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
        if app.live:
            log.warning("ending requests that did not finish within drain_s", extra={"count": len(app.live)})
            app.end_all()
    finally:
        if rpc is not None:
            await rpc.stop(LAST_RPCS_S)
        if hold is not None:
            await hold.stop()
        await router.stop()
        client.close()
        server.should_exit = True
        await serving
        if private is not None and telling is not None and app.peers is not None:
            private[0].should_exit = True
            await telling
            app.peers.close()


def _private(
    app: RouterApp, config: RouterConfig, client: HttpClient
) -> tuple[HttpServer, socket.socket] | None:
    """The server of this process's own metrics, for the other routers."""
    if not config.peers_dir:
        return None
    peers = PeerMetrics(Path(config.peers_dir), config.name, client, app.own_metrics)
    try:
        made = peers.bind()
    except OSError as error:
        log.error("/metrics shows this router alone: %s: %s", config.peers_dir, error)
        return None
    app.peers = peers
    limits = ConnectionLimits(config.max_head_bytes, config.head_timeout_s, 64, None)
    return HttpServer(peers, limits), made


def owner_path(config: RouterConfig) -> Path:
    """Path of the socket on which the router with the journal answers the other routers."""
    return Path(config.held_dir) / "owner.sock"


def open_journal(config: RouterConfig) -> DurableQueue | None:
    """None if it cannot be used, which is logged: requests without a key are still served."""
    try:
        return DurableQueue(Path(config.held_dir) / "journal")
    except JournalError as error:
        log.error("requests with a key are refused while no replica is ready: %s", error)
        return None


def bind_owner(config: RouterConfig) -> socket.socket:
    """Only this user can connect; clients' keys are checked here as on the port."""
    return listen_private(owner_path(config))


async def _started_grpc(app: RouterApp, config: RouterConfig, concurrent: int) -> GrpcServer | None:
    if config.grpc_port is None:
        return None
    from ridgeline.web.grpc.listener import GrpcServer, RpcLimits

    server = GrpcServer(app, RpcLimits(config.max_body_bytes, config.max_head_bytes, concurrent))
    await server.start(config.host, config.grpc_port, shared=True)
    return server


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--control", required=True)
    arguments = parser.parse_args()
    with os.fdopen(0, "rb", buffering=0, closefd=False) as line:
        config = msgspec.json.decode(line.readline(), type=RouterConfig)
    listener = socket.socket(fileno=arguments.listener)
    os.set_inheritable(arguments.listener, False)
    try:
        run_router(config, listener, arguments.control)
    except OptionError as error:
        sys.exit(f"the router cannot start: {error}")


if __name__ == "__main__":
    main()
