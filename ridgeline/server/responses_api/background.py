"""Background responses: runs without a connection. A client that knows the id can watch, await or cancel one.

A run takes its pieces from a RunningRequest like any answer, writes its events into a log that streams
replay, and its result into the store. A run interrupted by the end of the server stays in the store as it
is; the next start finds it and marks it as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import msgspec
from starlette.types import Receive, Scope, Send

from ridgeline.server.answering.answer import EVENT_STREAM_HEADERS, KEEPALIVE, size_bytes
from ridgeline.server.answering.running_request import RunningRequest
from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError, SlowReader, reply_to, unexpected
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import while_connected
from ridgeline.server.responses_api.bodies import ResponseBody, Status
from ridgeline.server.responses_api.shape import ResponseShape
from ridgeline.server.responses_api.store import ResponseStore

log = logging.getLogger("ridgeline.server")

MAX_KEPT_BYTES = 64 << 20  # of the logs of ended runs, for streams that have not caught up
MAX_KEPT_RUNS = 256
EVENTS_AT_ONCE = 256  # per write of a replayed log: bounds what must be read within the stall time
PATIENCE_S = 60.0  # how often a queued run checks its deadline


class BackgroundRun:
    """One background response. `events[n]` is the event with the sequence number n."""

    def __init__(self, shape: ResponseShape, store: ResponseStore, streams: bool) -> None:
        self.shape = shape
        self.streams = streams
        self.events: list[bytes] = []
        self.kept_bytes = 0
        self.has_ended = False
        self._is_ending = False  # from then on, cancel() only waits
        self._store = store
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._log(shape.opening_events())

    @property
    def id(self) -> str:
        return self.shape.body.id

    @property
    def status(self) -> Status:
        """The current status, while the store has an older one."""
        return "queued" if self.shape.body.status == "queued" else "in_progress"

    def start(self, request: RunningRequest) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run(request))
        return self._task

    async def cancel(self) -> ResponseBody:
        """The response when this returns: cancelled, unless it had already ended."""
        if self._task is not None and not self._task.done():
            if not self._is_ending:
                self._cancelled = True
                self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(self._task)
            if not self._is_ending:  # cancelled before it started
                await self._finish(self.shape.cancelled_events())
        return self.shape.body

    async def wait_for(self, count: int) -> None:
        """Wait until there are more than `count` events, or the run has ended."""
        while len(self.events) <= count and not self.has_ended:
            await self._changed.wait()

    async def _run(self, request: RunningRequest) -> None:
        try:
            with request:
                told_bytes = 0
                while (pieces := await request.next_pieces(PATIENCE_S)) is not None:
                    told_bytes += size_bytes(pieces)
                    self._log([event for piece in pieces for event in self.shape.piece_events(piece)])
                self._is_ending = True
                usage = request.choices.usage(False)
                last = await off_loop(told_bytes, lambda: self.shape.closing_events(usage))
        except asyncio.CancelledError:
            if not self._cancelled:
                raise  # the server is stopping; its next start marks the run as failed
            last = self.shape.cancelled_events()
        except Exception as error:
            reply = reply_to(error)
            if reply is None:
                request_id = request.context.request_id
                log.exception("unexpected error", extra={"request_id": request_id})
                reply = unexpected(request_id)
            request.book_refusal(reply)
            last = self.shape.failure_events(reply)
        await self._finish(last)

    async def _finish(self, last: list[bytes]) -> None:
        self._is_ending = True
        try:
            await self._store.update(self.shape.body)
        except ApiError as error:
            log.error("background response %s could not be stored: %s", self.id, error)
        self.has_ended = True
        self._log(last)  # sent when it is stored

    def _log(self, events: list[bytes]) -> None:
        if self.streams:
            self.events += events
            self.kept_bytes += sum(map(len, events))
        self._changed.set()
        self._changed = asyncio.Event()


class Background:
    """The runs of one server: running ones, and the logs of some that have ended."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_running = config.background_responses
        self._running: dict[str, BackgroundRun] = {}
        self._ended: dict[str, BackgroundRun] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop holds only weak references

    def check_room(self) -> None:
        if len(self._running) >= self._max_running:
            message = f"{self._max_running} background responses are running, this server's limit"
            headers = {"retry-after": "5"}
            raise ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)

    @contextlib.contextmanager
    def room_for(self, run: BackgroundRun) -> Iterator[None]:
        """Reserves the run's place; releases it if the preparation before its start fails."""
        self.check_room()
        self._running[run.id] = run
        try:
            yield
        except BaseException:
            del self._running[run.id]
            raise

    def start(self, run: BackgroundRun, request: RunningRequest) -> None:
        """Start a run that has its place."""
        task = run.start(request)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(run, task))

    def running(self, id: str) -> BackgroundRun | None:
        return self._running.get(id)

    def streamed(self, id: str) -> BackgroundRun | None:
        """A run whose events are still available from the first."""
        run = self._running.get(id) or self._ended.get(id)
        return run if run is not None and run.streams else None

    async def ended(self, patience_s: float) -> None:
        """Wait until every run has ended and is stored, up to a limit."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)

    def forget(self, id: str) -> None:
        self._ended.pop(id, None)

    def now(self, body: ResponseBody) -> ResponseBody:
        """The stored response with its current status: the store is written only at start and end."""
        run = self._running.get(body.id)
        return body if run is None else msgspec.structs.replace(body, status=run.status)

    def _end(self, run: BackgroundRun, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running.pop(run.id, None)
        if run.streams:
            self._ended[run.id] = run
        kept = sum(ended.kept_bytes for ended in self._ended.values())
        while self._ended and (kept > MAX_KEPT_BYTES or len(self._ended) > MAX_KEPT_RUNS):
            oldest = self._ended.pop(next(iter(self._ended)))
            kept -= oldest.kept_bytes


class Replay:
    """A run's events from some point on, as they are made: an ASGI app. Leaving it does not end the run."""

    def __init__(self, run: BackgroundRun, first: int, config: ServerConfig) -> None:
        self._run = run
        self._next = first
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM_HEADERS)})
        await while_connected(receive, self._tell(send))

    async def _tell(self, send: Send) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.stream_keepalive_s):
                    await self._run.wait_for(self._next)
            events = self._run.events[self._next : self._next + EVENTS_AT_ONCE]
            self._next += len(events)
            is_last = self._run.has_ended and self._next >= len(self._run.events)
            try:
                async with asyncio.timeout(self._config.stream_stall_s):
                    body = b"".join(events) or (b"" if is_last else KEEPALIVE)
                    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            except TimeoutError:
                raise SlowReader from None
            if is_last:
                return
