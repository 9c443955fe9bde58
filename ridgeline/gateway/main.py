"""`ridgeline gateway`: the supervisor. Binds the ports, starts the workers and starts again those that die,
serves the administrators' listener, and passes on the signal to stop. Never touches a client's request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.gateway.config import GatewaySettings, to_json
from ridgeline.gateway.errors import BadRequest, GatewayError, Unavailable
from ridgeline.gateway.internal import internal_path
from ridgeline.gateway.observe.metrics import merged
from ridgeline.options import OptionError
from ridgeline.telemetry import logs
from ridgeline.version import __version__

log = logging.getLogger("ridgeline.gateway")

START_S = 60.0
RESTART_S = 1.0  # between a worker's death and the next start, so that a broken set-up does not spin
ASK_S = 2.0
STOP_GRACE_S = 15.0  # beyond the drain
BACKLOG = 2048


@dataclass(slots=True)
class Worker:
    number: int
    process: asyncio.subprocess.Process
    is_ready: bool = False

    @property
    def name(self) -> str:
        return f"{self.number}:{self.process.pid}"


def run(settings: GatewaySettings, reread: Callable[[], GatewaySettings]) -> int:
    """Serve until told to stop. Returns the exit code. Logs are set up.

    reread: the settings as the file has them now.
    """
    gateway = settings.gateway
    state_dir = settings.state_dir
    state_dir.mkdir(parents=True, exist_ok=True)
    state_dir.chmod(0o700)
    with _alone(state_dir):
        listener = _bind(gateway.host, gateway.port, "[gateway]")
        if sys.platform != "win32":
            import uvloop

            return uvloop.run(Supervisor(settings, reread, listener).run())
        return asyncio.run(Supervisor(settings, reread, listener).run())


@contextlib.contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Two gateways in one folder would each count limits by themselves, and take each other's sockets."""
    with (state_dir / "gateway.lock").open("wb") as lock:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OptionError(
                    f"[gateway] state_dir: another gateway runs in {state_dir}; stop it, or name another"
                ) from None
        yield


class Supervisor:
    def __init__(
        self, settings: GatewaySettings, reread: Callable[[], GatewaySettings], listener: socket.socket
    ) -> None:
        self._settings, self._reread = settings, reread
        self._listener = listener
        self._workers: dict[int, Worker] = {}
        self._stopping = self._reloading = False
        self._told: asyncio.Task[None] | None = None  # a reload that a signal asked for
        self._failed_starts = 0
        self._pages = merged()
        self._began = time.monotonic()

    async def run(self) -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload_on_signal)
        from ridgeline.gateway.admin.listener import AdminListener

        admin = AdminListener(self._settings, self.status, self.metrics, self.reload)
        keepers: list[asyncio.Task[None]] = []
        try:
            await admin.start()
            first = [loop.create_future() for _ in range(self._settings.gateway.workers)]
            keepers = [loop.create_task(self._keep(n, begun)) for n, begun in enumerate(first)]
            stopped = loop.create_task(stop.wait())
            started = asyncio.ensure_future(asyncio.gather(*first))
            waits: list[asyncio.Future[Any]] = [started, stopped, *keepers]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()  # a worker that never came up: says why
            if started.done():
                self._say_ready(admin)
            await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
        except GatewayStartError as error:
            logs.fail(f"ridgeline gateway: {error}")
            return 1
        finally:
            self._stopping = True
            await self._end_workers()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await admin.stop()
        return 0

    # ---- workers ----

    async def _keep(self, number: int, begun: asyncio.Future[None]) -> None:
        """One worker, started again whenever it dies."""
        while not self._stopping:
            worker = await self._start(number)
            if worker is None:
                self._failed_starts += 1
                if not begun.done():
                    raise GatewayStartError(f"worker {number} did not come up; its log lines say why")
            else:
                if not begun.done():
                    begun.set_result(None)
                code = await worker.process.wait()
                self._pages.end(worker.name)
                self._workers.pop(number, None)
                if self._stopping:
                    return
                if self._reloading:
                    continue
                log.error("a worker died and is started again", extra={"worker": number, "exit_code": code})
            await asyncio.sleep(RESTART_S)

    async def _start(self, number: int) -> Worker | None:
        descriptor = self._listener.fileno()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ridgeline.gateway.worker",
            "--listener",
            str(descriptor),
            "--number",
            str(number),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[descriptor],
        )
        worker = self._workers[number] = Worker(number, process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(to_json(self._settings) + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
        except TimeoutError:
            line = b""
        if line.strip() == b"ready":
            worker.is_ready = True
            return worker
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self._workers.pop(number, None)
        return None

    async def _end_workers(self) -> None:
        workers = list(self._workers.values())
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGTERM)
        limit = self._settings.gateway.drain_s + STOP_GRACE_S
        for worker in workers:
            try:
                await asyncio.wait_for(worker.process.wait(), limit)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()

    # ---- what the administrators see ----

    async def status(self) -> dict[str, Any]:
        workers = {}
        for number in list(self._workers):
            answer = await self._ask("GET", "/status", number)
            workers[str(number)] = msgspec.json.decode(answer) if answer else None
        return {"version": __version__, "up_s": round(time.monotonic() - self._began, 1), "workers": workers}

    async def metrics(self) -> str:
        for number, worker in list(self._workers.items()):
            page = await self._ask("GET", "/metrics", number)
            if page:
                self._pages.update(worker.name, page.decode())
        return self._pages.text()

    async def reload(self) -> dict[str, Any]:
        """Read the file again; if it is good, one worker after the other drains and starts anew with it.

        The listening socket stays open meanwhile: a connection may wait, but is not refused.
        """
        if self._reloading:
            raise Unavailable("the gateway is being reloaded already", code="reloading")
        try:
            settings = self._reread()
        except OptionError as error:
            raise BadRequest(str(error), code="invalid_configuration") from None
        fixed = ("host", "port", "workers", "state_dir")
        changed = [n for n in fixed if getattr(settings.gateway, n) != getattr(self._settings.gateway, n)]
        if changed or settings.admin != self._settings.admin or settings.store != self._settings.store:
            what = ", ".join([f"[gateway] {name}" for name in changed] or ["[admin] or [store]"])
            raise BadRequest(f"{what}: changed; that needs a restart of the gateway")
        before = self._settings
        self._settings, self._reloading = settings, True
        try:
            for number in list(self._workers):
                if not await self._replace(number):
                    self._settings = before  # with which it is tried again in a moment
                    raise BadRequest(
                        "a worker did not come up with the new settings (its log lines say why); "
                        "the gateway goes on with the old ones",
                        code="invalid_configuration",
                    )
        finally:
            self._reloading = False
        return {"workers": len(self._workers), "models": [one.name for one in settings.models]}

    def _reload_on_signal(self) -> None:
        async def told() -> None:
            try:
                log.info("reloaded", extra=await self.reload())
            except GatewayError as error:
                log.error("not reloaded: %s", error)

        self._told = asyncio.get_running_loop().create_task(told())

    async def _replace(self, number: int) -> bool:
        """Whether another one is there in its place."""
        old, failed = self._workers.get(number), self._failed_starts
        if old is None:
            return True
        old.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + self._settings.gateway.drain_s + STOP_GRACE_S + START_S
        while time.monotonic() < until:
            new = self._workers.get(number)
            if new is not None and new is not old and new.is_ready:
                return True
            if self._failed_starts != failed:
                return False
            await asyncio.sleep(0.05)
        return False

    async def _ask(self, method: str, path: str, number: int) -> bytes:
        try:
            async with asyncio.timeout(ASK_S):
                where = str(internal_path(self._settings.state_dir, number))
                reader, writer = await asyncio.open_unix_connection(where)
                try:
                    writer.write(f"{method} {path} HTTP/1.0\r\nhost: worker\r\n\r\n".encode())
                    _, _, body = (await reader.read()).partition(b"\r\n\r\n")
                    return body
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""

    def _say_ready(self, admin: Any) -> None:
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._settings.gateway.ssl_certfile is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        models = [one.name for one in self._settings.models] + [one.name for one in self._settings.routes]
        lines = f"{self._started_lines(admin)}\nserving on {url}"
        logs.say(lines, "serving", version=__version__, url=url, admin_url=admin.url, models=models)

    def _started_lines(self, admin: Any) -> str:
        gateway = self._settings.gateway
        store = "PostgreSQL" if self._settings.store.url else f"SQLite in {self._settings.state_dir}"
        limits = "Redis" if self._settings.redis.url else "this process"
        workers = f"{gateway.workers} worker" + ("s" if gateway.workers > 1 else "")
        took_s = time.monotonic() - self._began
        lines = [
            f"ridgeline {__version__} · gateway · {workers} · ready in {took_s:.2f} s",
            f"  store {store} · limits in {limits}",
            f"  models {', '.join(one.name for one in self._settings.models)}"
            + "".join(f", {route.name} (route)" for route in self._settings.routes),
            f"  admin {admin.url} · key in {admin.key_path}",
        ]
        if not gateway.require_keys:
            lines.append("  no keys needed: everybody on this machine may ask")
        return "\n".join(lines)


class GatewayStartError(Exception):
    """The gateway cannot start; the message says why."""


def _bind(host: str, port: int, section: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
        listener.listen(BACKLOG)
    except OSError as error:
        raise OptionError(f"{section} cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    os.set_inheritable(listener.fileno(), True)
    return listener
