"""`ridgeline gateway`: the supervisor. Binds the ports, starts the workers, restarts those that die, serves
the admin API, and forwards the signal to stop. Never handles a client's request.
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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.gateway.errors import BadRequest, GatewayError, Unavailable
from ridgeline.gateway.objects.spool import remove_stale_uploads
from ridgeline.gateway.observe.metrics import merged
from ridgeline.gateway.process.rpc import held_grpc_port
from ridgeline.gateway.process.worker_process import WorkerProcess, WorkerRefused
from ridgeline.gateway.settings import GatewaySettings
from ridgeline.options import OptionError
from ridgeline.running import SetState, announced
from ridgeline.telemetry import logs
from ridgeline.version import __version__

log = logging.getLogger("ridgeline.gateway")

RESTART_S = 1.0  # between a worker's death and its restart, so that a broken set-up does not spin
BACKLOG = 2048


def run(settings: GatewaySettings, reread: Callable[[], GatewaySettings]) -> int:
    """Serve until a signal to stop. Returns the exit code. Logging must be set up.

    reread: reads the settings from the file again.
    """
    gateway = settings.gateway
    state_dir = settings.state_dir
    state_dir.mkdir(parents=True, exist_ok=True)
    state_dir.chmod(0o700)
    with _alone(state_dir):
        for name in ("worker-*.sock", "limits-*.sock"):  # of workers whose supervisor was killed
            for path in state_dir.glob(name):
                path.unlink(missing_ok=True)
        remove_stale_uploads(state_dir)
        listener = _bind(gateway.host, gateway.port, "[gateway]")
        with (
            held_grpc_port(settings, reread) as (settings, reread),
            announced("gateway", _url(settings, listener), _names(settings)) as set_state,
        ):
            serving = Supervisor(settings, reread, listener, set_state).run()
            if sys.platform != "win32":
                import uvloop

                return uvloop.run(serving)
            return asyncio.run(serving)


@contextlib.contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Two gateways in one folder would count limits separately and use the same sockets."""
    with (state_dir / "gateway.lock").open("wb") as lock:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OptionError(
                    f"[gateway] state_dir: another gateway runs in {state_dir}; stop it or set another"
                ) from None
        yield


class Supervisor:
    def __init__(
        self,
        settings: GatewaySettings,
        reread: Callable[[], GatewaySettings],
        listener: socket.socket,
        set_state: SetState,
    ) -> None:
        self._settings, self._reread = settings, reread
        self._listener = listener
        self._set_state = set_state
        self._workers: dict[int, WorkerProcess] = {}  # serving, by number
        self._leaving: set[WorkerProcess] = set()  # draining
        self._changing = asyncio.Lock()  # one start, restart or reload at a time
        self._stopping = self._reloading = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._pages = merged()
        self._began = time.monotonic()

    async def run(self) -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._begin(self._reload_on_signal()))
        from ridgeline.gateway.admin.listener import AdminListener

        public = self._listener.getsockname()[:2]
        admin = AdminListener(self._settings, self.status, self.metrics, self.reload, public)
        try:
            await admin.start()
            stopped = loop.create_task(stop.wait())
            starting = loop.create_task(self._start_all())
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                state_dir, key_file = str(self._settings.state_dir), str(admin.key_path)
                self._set_state("ready", admin_url=admin.url, state_dir=state_dir, key_file=key_file)
                self._say_ready(admin)
            else:
                starting.cancel()
            await stopped
        except WorkerRefused as error:
            logs.fail(f"ridgeline gateway: {error}")
            return 1
        finally:
            self._stopping = True
            self._set_state("stopping")
            await self._end_workers()
            await admin.stop()
        return 0

    # ---- workers ----

    async def _start_all(self) -> None:
        async with self._changing:
            starts = [self._start(n, self._settings) for n in range(self._settings.gateway.workers)]
            made = await asyncio.gather(*starts, return_exceptions=True)
            workers = [one for one in made if isinstance(one, WorkerProcess)]
            for refusal in made:
                if isinstance(refusal, BaseException):
                    await _kill(workers)
                    raise refusal
            for worker in workers:
                await self._install(worker)

    async def _start(self, number: int, settings: GatewaySettings) -> WorkerProcess:
        return await WorkerProcess.start(number, settings, self._listener)

    async def _install(self, worker: WorkerProcess) -> None:
        """Let it serve. Just before, its predecessor stops accepting and hands over its limits."""
        old = self._workers.get(worker.number)
        self._workers[worker.number] = worker
        worker.on_leaving = lambda: self._begin(self._roll(worker))
        self._begin(self._watch(worker))
        if old is not None:
            self._leaving.add(old)
            await old.hand_over(worker)
            self._begin(old.end())
        await worker.serve()

    async def _watch(self, worker: WorkerProcess) -> None:
        """Restart a worker that died without being told to stop."""
        code = await worker.wait()
        self._pages.end(worker.name)
        self._leaving.discard(worker)
        if self._workers.get(worker.number) is not worker:
            return
        del self._workers[worker.number]
        while not self._stopping and worker.number not in self._workers:
            log.error("a worker died; starting another", extra={"worker": worker.number, "exit_code": code})
            await asyncio.sleep(RESTART_S)
            try:
                async with self._changing:
                    if not self._stopping and worker.number not in self._workers:
                        await self._install(await self._start(worker.number, self._settings))
            except WorkerRefused as error:
                log.error("%s", error)

    async def _roll(self, worker: WorkerProcess) -> None:
        """Replace a worker that got SIGTERM. It serves until its successor is ready."""
        async with self._changing:
            if self._stopping or self._workers.get(worker.number) is not worker:
                return
            try:
                await self._install(await self._start(worker.number, self._settings))
            except WorkerRefused as error:
                log.error("could not replace a worker that got SIGTERM: %s", error)

    async def _end_workers(self) -> None:
        """Drain all workers at once. The port is closed first: new connections are refused at once."""
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        workers = [*self._workers.values(), *self._leaving]
        for worker in workers:
            worker.drain()
        await asyncio.gather(*(worker.end() for worker in workers))

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- for the admin API ----

    async def status(self) -> dict[str, Any]:
        workers = {}
        for worker in [*self._workers.values(), *self._leaving]:
            answer = await worker.ask("/status")
            shown = worker.name if worker in self._leaving else str(worker.number)
            workers[shown] = msgspec.json.decode(answer) if answer else None
        return {"version": __version__, "up_s": round(time.monotonic() - self._began, 1), "workers": workers}

    async def metrics(self) -> str:
        for worker in [*self._workers.values(), *self._leaving]:
            page = await worker.ask("/metrics")
            if page:
                self._pages.update(worker.name, page.decode())
        return self._pages.text()

    async def reload(self) -> dict[str, Any]:
        """Read the file again. New workers start with it; once all are ready, they replace the old ones.

        Nothing changes if the file or any new worker is refused.
        """
        if self._reloading:
            raise Unavailable("a reload is already running", code="reloading")
        try:
            settings = self._reread()
        except OptionError as error:
            raise BadRequest(str(error), code="invalid_configuration") from None
        fixed = ("host", "port", "grpc_port", "workers", "state_dir")
        changed = [n for n in fixed if getattr(settings.gateway, n) != getattr(self._settings.gateway, n)]
        if changed or settings.admin != self._settings.admin or settings.store != self._settings.store:
            what = ", ".join([f"[gateway] {name}" for name in changed] or ["[admin] or [store]"])
            raise BadRequest(f"{what} changed; restart the gateway to apply it")
        self._reloading = True
        try:
            async with self._changing:
                await self._replace_all(settings)
        finally:
            self._reloading = False
        return {"workers": len(self._workers), "models": [one.name for one in settings.models]}

    async def _replace_all(self, settings: GatewaySettings) -> None:
        new: list[WorkerProcess] = []
        try:
            for number in range(settings.gateway.workers):
                # One after the other: each start takes a core for a second, which requests need.
                new += [await self._start(number, settings)]
            if self._stopping:
                raise Unavailable("the gateway is stopping", code="shutting_down")
        except WorkerRefused as error:
            await _kill(new)
            message = f"{error}; the gateway keeps its current settings"
            raise BadRequest(message, code="invalid_configuration") from None
        except BaseException:
            await _kill(new)
            raise
        self._settings = settings
        for worker in new:
            await self._install(worker)

    async def _reload_on_signal(self) -> None:
        try:
            log.info("reloaded", extra=await self.reload())
        except GatewayError as error:
            log.error("not reloaded: %s", error)

    def _say_ready(self, admin: Any) -> None:
        url, models = _url(self._settings, self._listener), _names(self._settings)
        lines = f"{self._started_lines(admin)}\nserving on {url}"
        port = self._settings.gateway.grpc_port
        told = {} if port is None else {"grpc_port": port}
        logs.say(lines, "serving", version=__version__, url=url, admin_url=admin.url, models=models, **told)

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
        if gateway.grpc_port is not None:
            lines.append(f"  gRPC on port {gateway.grpc_port}")
        if not gateway.require_keys:
            lines.append("  keys are not required: any process on this machine may send requests")
        return "\n".join(lines)


async def _kill(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()
        await worker.wait()


def _url(settings: GatewaySettings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.gateway.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _names(settings: GatewaySettings) -> list[str]:
    return [one.name for one in settings.models] + [one.name for one in settings.routes]


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
