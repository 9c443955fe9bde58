"""Offload: handles large inputs in other processes, so that the worker's event loop stays free.

Pure Python in a thread would hold the interpreter's lock, and so would one long call into a parser. The jobs
are in `worker.Jobs`. One tenant uses at most all processes but one at a time, and waiting tenants take turns:
a tenant's large inputs do not delay those of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import struct
import sys
from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec

from ridgeline.gateway.body import Fields
from ridgeline.gateway.errors import GatewayError, Limited, Unavailable
from ridgeline.gateway.settings import GatewaySettings, to_json

LARGE = 64 << 10  # bytes; a smaller input is handled on the event loop, in 1 to 2 ms
PROCESSES = 2
MOST_WAITING = 64  # jobs of one tenant
LONGEST_S = 300.0  # for one job, such as a batch file of the largest size; then its process is replaced
READ_LIMIT = 1 << 20

Process = asyncio.subprocess.Process
PlainFields = dict[str, bytes]


def is_large(fields: Fields) -> bool:
    return sum(memoryview(value).nbytes for value in fields.values()) > LARGE


def plain(fields: Fields) -> PlainFields:
    return {name: bytes(value) for name, value in fields.items()}


def raw_fields(fields: PlainFields) -> Fields:
    return {name: msgspec.Raw(value) for name, value in fields.items()}


class Offload:
    """Processes start with the first job, or with `start`."""

    def __init__(self, settings: GatewaySettings, processes: int = PROCESSES) -> None:
        self._settings = settings
        self._most = processes
        self._idle: list[Process] = []
        self._alive: set[Process] = set()
        self._ended: list[Process] = []  # killed, but still alive at the last check
        self._busy: Counter[str] = Counter()  # processes by tenant
        self._waiting: OrderedDict[str, deque[asyncio.Future[Process]]] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting = 0
        self._closed = False

    def start(self) -> None:
        while not self._closed and len(self._alive) + self._starting < self._most:
            self._starting += 1
            self._in_background(self._start())

    async def run(self, tenant: str, job: str, *arguments: Any) -> Any:
        """The job's result; raises the job's GatewayError. A cancelled caller leaves the job running."""
        if len(self._waiting.get(tenant, ())) >= MOST_WAITING:
            raise Limited("too many large requests of this tenant are waiting", 1, code="too_many_large")
        self.start()
        process = await self._process(tenant)
        work = self._in_background(self._done(process, tenant, pickle.dumps((job, arguments))))
        told, result = pickle.loads(await asyncio.shield(work))
        if told == "error":
            kind, message, status, code, param, headers = result
            error = kind.__new__(kind)
            GatewayError.__init__(error, message, status=status, code=code, param=param, headers=headers)
            raise error
        if told == "failed":
            raise GatewayError(f"a large request could not be read ({result})")
        return result

    async def close(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in list(self._alive):
            self._end(process)
        for process in self._ended:
            await process.wait()

    # ---- turns ----

    async def _process(self, tenant: str) -> Process:
        turn: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give_turns()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(turn.result(), tenant)
            raise

    def _give_turns(self) -> None:
        most_each = max(self._most - 1, 1)
        for tenant in list(self._waiting):
            if not self._idle:
                return
            turns = self._waiting[tenant]
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns and self._busy[tenant] < most_each:
                self._busy[tenant] += 1
                turns.popleft().set_result(self._idle.pop())
                self._waiting.move_to_end(tenant)
            if not turns:
                del self._waiting[tenant]

    def _give_back(self, process: Process, tenant: str) -> None:
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
        if process in self._alive and process.returncode is None:
            self._idle.append(process)
        else:
            self._end(process)
            self.start()
        self._give_turns()

    # ---- processes ----

    async def _done(self, process: Process, tenant: str, question: bytes) -> bytes:
        try:
            async with asyncio.timeout(LONGEST_S):
                return await _ask(process, question)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            self._end(process)
            raise Unavailable("a large request could not be read; try again", code="offload_failed") from None
        except asyncio.CancelledError:
            self._end(process)
            raise
        finally:
            self._give_back(process, tenant)

    async def _start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ridgeline.gateway.offload.worker"),
                stdin=pipe,
                stdout=pipe,
                limit=READ_LIMIT,
            )
        finally:
            self._starting -= 1
        self._alive.add(process)
        try:
            await _ask(process, to_json(self._settings))
        except (OSError, asyncio.IncompleteReadError):
            self._end(process)
            return
        except asyncio.CancelledError:
            self._end(process)
            raise
        self._idle.append(process)
        self._give_turns()

    def _end(self, process: Process) -> None:
        self._alive.discard(process)
        self._ended = [one for one in self._ended if one.returncode is None] + [process]
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                process.kill()

    def _in_background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _ask(process: Process, question: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(struct.pack("<Q", len(question)))
    process.stdin.write(question)
    await process.stdin.drain()
    (length,) = struct.unpack("<Q", await process.stdout.readexactly(8))
    return await process.stdout.readexactly(length)
