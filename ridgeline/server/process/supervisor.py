"""Supervisor of one engine process: start, readiness by progress, restart after a crash, stop.

The client ends open streams of a dead engine with an explicit error; the supervisor starts the next engine. A
first engine that cannot start ends the service; a later one is retried indefinitely, because what it lacks
(memory, a file) was available before and may return.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.engine.client.launch import (
    ENGINE_PROGRAM,
    STOP_S,
    connect_when_ready,
    exit_reason,
    launch,
    load_tokenizer,
    socket_folder,
    stack_file,
)
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import EngineDied
from ridgeline.server.config import ServerConfig

if TYPE_CHECKING:
    from ridgeline.engine.client.client import AsyncClient
    from ridgeline.models.text.tokenizer import Tokenizer

log = logging.getLogger("ridgeline.supervisor")

PING_EVERY_S = 1.0
HUNG_AFTER_STALLS = 8  # kill and restart an engine after this many stall times without progress
RESTART_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # after consecutive deaths; the last value repeats
STACK_S = 1.0  # for a stuck engine to write its stack
STABLE_AFTER_S = 60.0  # an engine that lived this long resets the pauses


class Supervisor:
    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        server: ServerConfig,
        program: tuple[str, ...] = ENGINE_PROGRAM,
    ) -> None:
        self.client: AsyncClient | None = None
        self.draining = False
        self.restarts = 0
        self.on_restart: Callable[[], None] = lambda: None
        self.on_start: Callable[[AsyncClient], None] = lambda client: None
        self._config = config
        self._path = path
        self._program = program
        self._tokenizer: Tokenizer | None = None
        self._stall_s = server.stall_s
        self._log_flags = (f"--log-level={server.log_level}", f"--log-format={server.log_format}")
        self._process: asyncio.subprocess.Process | None = None
        self._folder = socket_folder()
        self._watch: asyncio.Task[None] | None = None
        self._stalled = False

    async def begin(self) -> None:
        """Start the engine process, and read the tokenizer while it loads.

        The memory that building the tokenizer needs for a moment is then reused by what the caller imports
        before `start`; after those imports it would be the front's peak.
        """
        self._process = await launch(
            self._config, self._path, self._socket_path(), self._log_flags, self._program
        )
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._path)

    async def start(self) -> None:
        """Start the engine, wait until it is ready, then watch it in the background."""
        if self._process is None:
            await self.begin()
        await self._connect()
        self._watch = asyncio.create_task(self._keep_running())

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, from `begin` on."""
        assert self._tokenizer is not None
        return self._tokenizer

    def ready(self) -> tuple[bool, str]:
        """Whether a new request would be computed now, and if not, why."""
        if self.draining:
            return False, "draining: finishing accepted requests, accepting no new ones"
        if self.client is None or self.client.closed.is_set():
            return False, "the engine is not running; it is starting"
        silent_s = time.monotonic() - self.client.heard_at
        if silent_s > self._stall_s:
            return False, f"the engine's loop has made no progress for {silent_s:.0f} s"
        return True, "ready"

    async def stop(self) -> None:
        """End the engine: request it, then signal."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._process is not None and self._process.returncode is None:
            if self.client is not None and not self.client.closed.is_set():
                self.client.stop_engine()
            else:
                self._signal(signal.SIGKILL)  # still starting: not connected yet, and nothing to finish
            await self._end_process()
        await self._forget_client()
        shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """Kill the engine at once: the front is about to exit."""
        if self._process is not None and self._process.returncode is None:
            self._signal(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- one engine process ----

    def _socket_path(self) -> Path:
        return self._folder / f"engine-{self.restarts}.sock"

    async def _connect(self) -> None:
        assert self._process is not None
        assert self._tokenizer is not None
        from ridgeline.engine.client.client import AsyncClient  # late: the engine process loads meanwhile

        path, tokenizer = self._socket_path(), self._tokenizer
        self.client = await connect_when_ready(
            self._process, path, lambda: AsyncClient.connect(path, tokenizer)
        )
        self._stalled = False
        self.on_start(self.client)

    # ---- the watch ----

    async def _keep_running(self) -> None:
        deaths = 0
        while True:
            started = time.monotonic()
            await self._watch_until_death()
            if time.monotonic() - started > STABLE_AFTER_S:
                deaths = 0
            log.error("the engine died (%s); restarting it", await self._end_process())
            while True:
                await asyncio.sleep(RESTART_PAUSES_S[min(deaths, len(RESTART_PAUSES_S) - 1)])
                deaths += 1
                self.restarts += 1
                self.on_restart()
                await self._forget_client()
                try:
                    await self.begin()
                    await self._connect()
                    break
                except Exception as error:  # any kind: this loop is the only one that retries
                    log.error("%s", error)
                    await self._end_process()

    async def _watch_until_death(self) -> None:
        """Ping the loop; a reply means progress. Returns when the connection is closed."""
        client = self.client
        assert client is not None
        pinging = asyncio.create_task(_keep_pinging(client))
        try:
            while not client.closed.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PING_EVERY_S):
                        await client.closed.wait()
                self._check_progress(client)
        finally:
            pinging.cancel()

    def _check_progress(self, client: AsyncClient) -> None:
        silent_s = time.monotonic() - client.heard_at
        if silent_s < self._stall_s:
            self._stalled = False
            return
        assert self._process is not None
        if not self._stalled:
            self._stalled = True
            log.error("no progress for %.0f s; asking the engine for its stack", silent_s)
            self._signal(signal.SIGUSR1)
            asyncio.get_running_loop().call_later(STACK_S, self._log_stack)
        elif silent_s > HUNG_AFTER_STALLS * self._stall_s:
            log.error("no progress for %.0f s; killing the engine", silent_s)
            self._signal(signal.SIGKILL)

    def _log_stack(self) -> None:
        with contextlib.suppress(OSError):  # the engine has already ended
            if stack := stack_file(self._socket_path()).read_text():
                log.error("stack of the engine:\n%s", stack)

    async def _end_process(self) -> str:
        """Wait for the process to end, and kill it if it takes too long; returns how it ended."""
        assert self._process is not None
        try:
            async with asyncio.timeout(STOP_S):  # wait_for would lose a cancellation here, on Python 3.11
                await self._process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        return exit_reason(self._process.returncode)

    async def _forget_client(self) -> None:
        """Close the connection. The totals already include the dead engine's last counters."""
        if self.client is not None:
            client, self.client = self.client, None
            await client.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)


async def _keep_pinging(client: AsyncClient) -> None:
    with contextlib.suppress(EngineDied):
        while True:
            await client.ping()
            await asyncio.sleep(PING_EVERY_S)
