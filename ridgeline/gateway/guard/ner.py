"""NameFinder: names and places by Presidio's NER, in processes of their own (`ner_worker.py`).

Importing Presidio takes seconds and its model hundreds of megabytes: neither belongs into a worker of the
gateway. Every text of a request goes in one question, which has a deadline; a process that misses it is ended
and started anew, and the request fails.
"""

from __future__ import annotations

import asyncio
import struct
import sys

import msgspec

from ridgeline.gateway.guard.config import GuardConfig
from ridgeline.gateway.guard.errors import GuardFailed
from ridgeline.gateway.guard.scanner import Finding

MOST_WAITING = 64
MOST_BYTES = 8 * 2**20
_START_S = 60.0

_decoder = msgspec.msgpack.Decoder(list[list[tuple[int, int, str]]])
_encode = msgspec.msgpack.Encoder().encode


class NameFinder:
    def __init__(self, config: GuardConfig) -> None:
        self._command = [
            sys.executable, "-m", "ridgeline.gateway.guard.ner_worker",
            config.ner_model, config.ner_language, ",".join(config.ner_kinds),
        ]  # fmt: skip
        self._timeout_s = config.ner_timeout_ms / 1000
        self._count = config.ner_processes
        self._idle: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        self._running: set[asyncio.subprocess.Process] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._closed = False

    async def find(self, texts: list[str]) -> dict[str, list[Finding]]:
        """Findings by text, in order and without overlaps; texts with none are left out."""
        question = _encode(texts)
        if self._waiting >= MOST_WAITING or len(question) > MOST_BYTES:
            raise GuardFailed("names cannot be looked for now: too much at once")
        self._start_missing()
        self._waiting += 1
        process: asyncio.subprocess.Process | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                process = await self._idle.get()
                found = await _ask(process, question)
        except BaseException as error:
            if process is not None:
                self._end(process)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise GuardFailed("names could not be looked for in time; nothing was forwarded") from None
        finally:
            self._waiting -= 1
        self._idle.put_nowait(process)
        if len(found) != len(texts):
            raise GuardFailed("names could not be looked for; nothing was forwarded")
        pairs = zip(texts, found, strict=True)
        return {text: [Finding(*span) for span in spans] for text, spans in pairs if spans}

    async def ready(self) -> None:
        """Waits until one process has read its model; tells at start what would else fail every request."""
        self._start_missing()
        async with asyncio.timeout(_START_S):
            while self._idle.empty():
                if not self._starting:
                    raise GuardFailed("NER did not start: is the spaCy model installed?")
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        self._closed = True
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for process in list(self._running):
            self._end(process)
            await process.wait()

    def _start_missing(self) -> None:
        while not self._closed and len(self._running) + len(self._starting) < self._count:
            task = asyncio.get_running_loop().create_task(self._start())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=2**22
        )
        self._running.add(process)
        try:
            async with asyncio.timeout(_START_S):
                await _ask(process, _encode([]))  # answered when the model is read
        except BaseException:
            self._end(process)
            await process.wait()
            raise
        self._idle.put_nowait(process)

    def _end(self, process: asyncio.subprocess.Process) -> None:
        self._running.discard(process)
        if process.returncode is None:
            process.kill()


async def _ask(process: asyncio.subprocess.Process, question: bytes) -> list[list[tuple[int, int, str]]]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(struct.pack("<I", len(question)) + question)
    await process.stdin.drain()
    (length,) = struct.unpack("<I", await process.stdout.readexactly(4))
    if length > MOST_BYTES:
        raise GuardFailed("names could not be looked for")
    return _decoder.decode(await process.stdout.readexactly(length))
