"""`ridgeline fleet up`: takes the lease, opens the control API, and runs the controller and its routers.

A signal or `fleet down` stops it. After the lease is lost, replicas and routers belong to the next
controller: this one exits, and ends none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from ridgeline.fleet.config import FleetConfig, FleetSettings
from ridgeline.fleet.controller.api.commands import Commands
from ridgeline.fleet.controller.api.control_app import control_app
from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.controller.lease import LeaseLost
from ridgeline.fleet.controller.life.replica_link import ReplicaLink
from ridgeline.fleet.controller.routers import RouterProcess, Routers, bind, find_routers
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.router.config import RouterConfig
from ridgeline.fleet.router.process import config_line, router_command
from ridgeline.fleet.substrates.choice import make_substrate
from ridgeline.fleet.substrates.substrate import SubstrateError
from ridgeline.options import OptionError
from ridgeline.proxy.http_client import HttpClient
from ridgeline.running import SetState, announced
from ridgeline.storage.errors import StorageError
from ridgeline.telemetry import logs
from ridgeline.version import __version__
from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.grpc.extra import check_port, require_grpc
from ridgeline.web.listener import HttpServer
from ridgeline.web.private_socket import listen_private

log = logging.getLogger("ridgeline.fleet")

SOCKET, REPLICA_KEY, TOKEN = "controller.sock", "replica-key", "control-token"
HELD, ROUTERS = "held", "routers"
STANDBY_S = 0.5
LIMITS = ConnectionLimits(head_bytes=32 << 10, head_s=10.0, connections=1024, per_address=None)


def run(settings: FleetSettings, reread: Callable[[], FleetSettings], standby: bool = False) -> int:
    """Run until a signal or `fleet down`. Returns the exit code. Logging must be set up.

    reread: reads fleet.toml again. standby: wait while another controller holds the lease.
    """
    settings.keys  # noqa: B018  # an OptionError now, not in a router
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    settings.state_dir.chmod(0o700)
    (settings.state_dir / "logs").mkdir(exist_ok=True, mode=0o700)
    serving = _run(settings, reread, standby)
    if sys.platform != "win32":
        import uvloop

        return uvloop.run(serving)
    return asyncio.run(serving)


async def _run(settings: FleetSettings, reread: Callable[[], FleetSettings], standby: bool) -> int:
    stop = asyncio.Event()
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: hurry.set() if stop.is_set() else stop.set())
    store = FleetStore(settings.state_dir)
    try:
        await store.open()
        if not await _take_lease(store, settings.state_dir, standby, stop):
            return 0
        adopted = find_routers(await store.fleet_id())
        listener = await _listener(settings, store, adopted)
        url = _url(listener)
        names = [model.name for model in settings.models]
        sources = [model.source for model in settings.models]
        with announced("fleet", url, names, sources) as set_state:
            fleet = _Fleet(settings, store, listener, adopted, url, set_state)
            return await fleet.run(reread, stop, hurry)
    except LeaseLost as error:  # the lease was lost during the start
        log.error("%s; this controller stops", error)
        return 1
    finally:
        with contextlib.suppress(Exception):
            await store.lease.release()
        await store.close()


async def _take_lease(store: FleetStore, state_dir: Path, standby: bool, stop: asyncio.Event) -> bool:
    """Returns False if a signal came during the wait."""
    said = False
    while (holder := await store.lease.try_take()) is not None:
        if not standby:
            raise OptionError(
                f"another controller (process {holder.pid}) uses {state_dir} (`ridgeline fleet status`). "
                "Apply a changed file with `ridgeline fleet roll`, wait for its end with --standby, or "
                "choose another directory with [fleet] state_dir"
            )
        if not said:
            log.info("standby: process %d holds the lease", holder.pid)
            said = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STANDBY_S):
                await stop.wait()
        if stop.is_set():
            return False
    return True


async def _listener(
    settings: FleetSettings, store: FleetStore, adopted: list[RouterProcess]
) -> socket.socket:
    port = settings.fleet.port
    if adopted and port == 0:
        port = int(await store.fact("port") or 0)
    if settings.fleet.grpc_port is not None:
        require_grpc("[fleet] grpc_port")
        if not adopted:  # only the routers share it, with each other
            check_port(settings.fleet.host, settings.fleet.grpc_port)
    listener = bind(settings.fleet.host, port, is_shared=bool(adopted))
    await store.set_fact("port", str(listener.getsockname()[1]))
    return listener


class _Fleet:
    """The parts of one controller process that holds the lease."""

    def __init__(
        self,
        settings: FleetSettings,
        store: FleetStore,
        listener: socket.socket,
        adopted: list[RouterProcess],
        url: str,
        set_state: SetState,
    ) -> None:
        self._settings, self._store, self._listener, self._adopted = settings, store, listener, adopted
        self._url, self._set_state = url, set_state
        self._client = HttpClient()
        key = secret_in(settings.state_dir / REPLICA_KEY)
        substrate = make_substrate(settings)
        self._controller = Controller(settings, store, substrate, ReplicaLink(self._client, key), key)

    async def run(
        self, reread: Callable[[], FleetSettings], stop: asyncio.Event, hurry: asyncio.Event
    ) -> int:
        controller, fleet = self._controller, self._settings.fleet
        keeping = asyncio.create_task(
            self._store.lease.keep()
        )  # finding replicas may take longer than it lasts
        try:
            await controller.start()
        except SubstrateError as error:
            raise OptionError(f"[substrate] {self._settings.substrate.kind}: {error}") from error
        finally:
            keeping.cancel()
        commands = Commands(controller, self._url, reread, stop.set)
        async with _control_api(self._settings, commands, takes_over=bool(self._adopted)):
            routers = self._routers(controller.fleet)
            await routers.start(self._adopted)
            self._set_state("starting", state_dir=str(self._settings.state_dir))
            tasks = [asyncio.create_task(controller.run()), asyncio.create_task(routers.watch())]
            saying = asyncio.create_task(self._say_ready())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            saying.cancel()
            holds_lease = await self._holds_lease(tasks)
            tasks[1].cancel()
            if not holds_lease:
                controller.leave()
                return 1
            self._set_state("stopping", state_dir=str(self._settings.state_dir))
            log.info(
                "stopping: running requests have %g s to finish; a second signal ends them", fleet.drain_s
            )
            controller.is_stopping = True
            await _unless(hurry, routers.end(fleet.drain_s), routers.kill)
            await _unless(hurry, controller.end(), lambda: asyncio.create_task(controller.keeper.kill()))
            await controller.keeper.all_ended()
            left = controller.keeper.left
            controller.leave()
            tasks[0].cancel()
        self._client.close()
        await controller.substrate.close()
        if left:
            logs.fail(f"the controller has stopped; these replicas could not be ended: {', '.join(left)}")
            return 1
        logs.say("the fleet has stopped; no process is left", "stopped")
        return 0

    async def _holds_lease(self, tasks: list[asyncio.Task[None]]) -> bool:
        """Whether this controller may end replicas and routers. Raises the error that ended a task."""
        try:
            for task in tasks:
                if task.done():
                    task.result()
            if self._controller.has_lost_lease:
                return False
            await self._store.lease.renew()
        except LeaseLost as error:
            log.error("%s; this controller stops, its replicas keep running", error)
            return False
        except StorageError as error:
            log.error("the lease was not renewed: %s", error)
        return True

    def _routers(self, fleet: str) -> Routers:
        settings = self._settings
        return Routers(
            fleet,
            settings.fleet.routers,
            self._listener,
            lambda descriptor: router_command(descriptor, settings.state_dir / SOCKET),
            lambda number: config_line(router_config(settings, number)),
            settings.state_dir / "logs",
            self._controller.events,
        )

    async def _say_ready(self) -> None:
        """Print the banner once every wanted replica serves."""
        models = self._controller.models
        keeper = self._controller.keeper
        while True:
            serving = {name: sum(one.serves for one in keeper.of(name)) for name in models}
            if all(serving[name] >= model.state.target for name, model in models.items()):
                break
            await asyncio.sleep(0.1)
        self._set_state("ready", state_dir=str(self._settings.state_dir))
        logs.say(ready_text(self._url, self._settings, serving), "serving", url=self._url, replicas=serving)


def ready_text(url: str, settings: FleetSettings, serving: dict[str, int]) -> str:
    model = settings.models[0]
    key = ' -H "authorization: Bearer $KEY"' if settings.fleet.api_keys or settings.fleet.api_key_file else ""
    shown = ", ".join(f"{name} × {count}" for name, count in serving.items())
    return "\n".join(
        (
            f"ridgeline {__version__} · fleet · {shown} · {settings.fleet.routers} router"
            + ("s" if settings.fleet.routers > 1 else ""),
            f"  state    {settings.state_dir}",
            f"  try      curl {url}/v1/chat/completions{key} -H 'content-type: application/json' \\",
            f'             -d \'{{"model": "{model.name}", "messages": '
            '[{"role": "user", "content": "Hello!"}]}\'',
            "  watch    ridgeline fleet status",
            f"serving on {url}",
        )
    )


def router_config(settings: FleetSettings, number: int) -> RouterConfig:
    fleet = settings.fleet
    return RouterConfig(
        host=fleet.host,
        grpc_port=fleet.grpc_port,
        keys=settings.keys,
        allowed_hosts=fleet.allowed_hosts,
        name=f"router-{number}",
        region=fleet.region,
        held_dir=str(settings.state_dir / HELD),
        keeps_journal=number == 0,
        peers_dir=str(settings.state_dir / ROUTERS),
        drain_s=fleet.drain_s,
        log_level=fleet.log_level,
        log_format=fleet.log_format,
    )


@contextlib.asynccontextmanager
async def _control_api(settings: FleetSettings, commands: Commands, takes_over: bool) -> AsyncIterator[None]:
    """Listen on the socket in the state directory, and on TCP if control_host is set."""
    path = settings.state_dir / SOCKET
    local = listen_private(path)  # the lease shows that the controller whose socket is there has ended
    inode = path.stat().st_ino
    servers = [HttpServer(control_app(commands), LIMITS)]
    serving = [servers[0].serve(sockets=[local])]
    if settings.fleet.control_host is not None:
        token = secret_in(settings.fleet.control_token_file or settings.state_dir / TOKEN)
        remote = _control_listener(settings.fleet, takes_over)
        servers.append(HttpServer(control_app(commands, token), LIMITS))
        serving.append(_serve_remote(servers[1], settings.fleet, remote))
    tasks = [asyncio.create_task(one) for one in serving]
    try:
        yield
    finally:
        # Leave the socket of a controller that has taken over. While ours is open, its inode is unique.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                path.unlink()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)


def _control_listener(fleet: FleetConfig, takes_over: bool) -> socket.socket | None:
    """Returns None if the port is in use, perhaps by the previous controller, which has not exited yet."""
    try:
        return bind(fleet.control_host or "", fleet.control_port, is_shared=False)
    except OptionError as error:
        if not takes_over:
            raise
        log.debug("the control API waits for its port: %s", error)
        return None


async def _serve_remote(server: HttpServer, fleet: FleetConfig, listener: socket.socket | None) -> None:
    if listener is None:
        log.error("the control API does not listen on port %d yet: it is in use", fleet.control_port)
    while listener is None:
        await asyncio.sleep(STANDBY_S)
        if server.should_exit:
            return
        listener = _control_listener(fleet, takes_over=True)
    log.info("the control API also listens on %s", _url(listener))
    await server.serve(sockets=[listener])


async def _unless(hurry: asyncio.Event, work: Coroutine[Any, Any, None], then: Callable[[], object]) -> None:
    """Do the work; call `then` if a second signal comes before its end."""
    working = asyncio.create_task(work)
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait([working, hurried], return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        then()
    hurried.cancel()
    await working


def secret_in(path: Path) -> str:
    """Read the secret of a file. A missing file is made, readable by this user alone."""
    with contextlib.suppress(FileExistsError):
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(made, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    secret = path.read_text(encoding="utf-8").strip()
    if not secret:
        raise OptionError(f"{path} is empty: remove it, and the controller makes a new one")
    return secret


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
