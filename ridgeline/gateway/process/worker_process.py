"""WorkerProcess: the supervisor's handle of a worker: start it, let it serve or drain, wait for it.

`worker.py` describes the lines that both exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sys
from collections.abc import Callable

from ridgeline.gateway.objects.spool import uploads_path
from ridgeline.gateway.process.internal import internal_path, limits_path
from ridgeline.gateway.settings import GatewaySettings, to_json

START_S = 120.0
SERVE_S = 10.0
HANDOVER_S = 1.0  # the new worker serves after this time, with or without the old one's limits
STOP_GRACE_S = 30.0  # beyond the drain: last events and last rows
ASK_S = 2.0


class WorkerRefused(Exception):
    """A worker did not start; the message gives the reason."""


class WorkerProcess:
    def __init__(self, number: int, settings: GatewaySettings, process: asyncio.subprocess.Process) -> None:
        self.number, self._settings, self._process = number, settings, process
        self.name = f"{number}-{process.pid}"
        self.on_leaving: Callable[[], None] | None = None  # it got SIGTERM from outside
        self._heard = {word: asyncio.Event() for word in ("ready", "serving", "handed")}
        self._refusal = ""
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, number: int, settings: GatewaySettings, listener: socket.socket) -> WorkerProcess:
        """Start a worker and wait until it is ready. WorkerRefused: it rejects the settings or fails."""
        descriptor = listener.fileno()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "ridgeline.gateway.process.worker"),
            *("--listener", str(descriptor), "--number", str(number)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[descriptor],
        )
        worker = cls(number, settings, process)
        try:
            worker._say(to_json(settings).decode())
            if not await worker._hears("ready", START_S):
                why = worker._refusal or f"it was not ready after {START_S:g} s; see its log lines"
                raise WorkerRefused(f"worker {number} did not start: {why}")
        except BaseException:
            worker.kill()
            await worker.wait()
            raise
        return worker

    async def serve(self) -> None:
        self._say("serve")
        await self._hears("serving", SERVE_S)

    async def hand_over(self, successor: WorkerProcess) -> None:
        """Stop accepting; return when the successor has the limits, or after HANDOVER_S."""
        self._say(f"drain {limits_path(self._settings.state_dir, successor.name)}")
        await self._hears("handed", HANDOVER_S)

    def drain(self) -> None:
        self._say("drain")

    async def end(self) -> None:
        """Wait for the end of its drain, then kill it."""
        try:
            await asyncio.wait_for(self.wait(), self._settings.gateway.drain_s + STOP_GRACE_S)
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        code = await self._process.wait()
        for path in (internal_path, limits_path):
            path(self._settings.state_dir, self.name).unlink(missing_ok=True)
        folder = uploads_path(self._settings.state_dir, self.name)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return code

    async def ask(self, path: str) -> bytes:
        """Its answer to GET `path`; empty if it does not answer."""
        try:
            async with asyncio.timeout(ASK_S):
                where = str(internal_path(self._settings.state_dir, self.name))
                reader, writer = await asyncio.open_unix_connection(where)
                try:
                    writer.write(f"GET {path} HTTP/1.0\r\nhost: worker\r\n\r\n".encode())
                    _, _, body = (await reader.read()).partition(b"\r\n\r\n")
                    return body
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode() + b"\n")

    async def _hears(self, word: str, within_s: float) -> bool:
        """Whether it writes this line before it ends and within the time limit."""
        heard = asyncio.create_task(self._heard[word].wait())
        await asyncio.wait([heard, self._listening], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        heard.cancel()
        return self._heard[word].is_set()

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while line := (await self._process.stdout.readline()).decode(errors="replace"):
            word, _, rest = line.strip().partition(" ")
            if word in self._heard:
                self._heard[word].set()
            elif word == "refused":
                self._refusal = rest
            elif word == "leaving" and self.on_leaving is not None:
                self.on_leaving()
