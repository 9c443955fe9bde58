"""Load: sends a plan's requests, in a closed loop or at their planned times, and keeps every SentRequest.

`run` makes one for the warm-up and one for the run. Due times come from one heap and one alarm; bodies are
made ahead, so that sending is only a write. It decides what is sent when; the client takes the timestamps.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ridgeline.lab.bench.client.client import Address, Client, SentRequest
from ridgeline.lab.bench.client.timer import Alarm, now
from ridgeline.lab.bench.config import ClosedLoop, OpenLoop, RequestDeadlines
from ridgeline.lab.traffic.request import PlannedRequest

AHEAD_BYTES = 64 << 20  # of bodies made ahead
LEAD_S = 0.02  # between the preparation and the first request
ENOUGH_S = 0.000_02  # what is due within this is sent at once


class Turn(Protocol):
    """A turn that follows an answer."""

    @property
    def index(self) -> int: ...
    @property
    def think_s(self) -> float: ...


class Script(Protocol):
    """What is sent and what follows: requests by index."""

    requests: Sequence[PlannedRequest]
    keeps_text: bool  # later turns need the answers

    def openers(self) -> list[int]: ...
    def body(self, index: int) -> bytes: ...
    def answered(self, sent: SentRequest) -> Turn | None: ...
    def failed(self, index: int) -> list[int]: ...


class Load:
    """sent: all requests that were sent or due, in start order. origin: the start."""

    def __init__(
        self,
        script: Script,
        mode: ClosedLoop | OpenLoop,
        address: Address,
        deadlines: RequestDeadlines,
        *,
        duration_s: float | None = None,
        run_s: float = 3600.0,
        warmup: bool = False,
        on_done: Callable[[SentRequest], None] = lambda sent: None,
    ) -> None:
        self._script, self._mode, self._warmup = script, mode, warmup
        self._duration_s, self._run_s, self._told = duration_s, run_s, on_done
        self._loop = asyncio.get_running_loop()
        self._client = Client(address, deadlines, self._ended)
        self._alarm = Alarm(self._loop, self._due)
        self._bodies = _Bodies(script)
        self._heap: list[tuple[float, int]] = []  # moment, request
        self._queue: deque[int] = deque()  # closed loop: waiting for a free slot
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._is_stopped = False
        self._cap = mode.max_concurrency if isinstance(mode, OpenLoop) else None
        self._under_way = 0
        self.sent: list[SentRequest] = []
        self.origin = 0.0

    @property
    def in_flight(self) -> int:
        return len(self._client.live)

    @property
    def retried(self) -> int:
        return self._client.retried

    def prepare(self) -> None:
        """Make the first bodies; not part of the run."""
        self._bodies.begin(self._script.openers())

    @property
    def lags(self) -> list[float]:
        """Delays of the client's own timers, in seconds."""
        return self._client.lags

    async def run(self) -> None:
        """Until all requests have ended or the run's time is over."""
        openers = self._script.openers()
        self.origin = now() + LEAD_S
        timers = [self._loop.call_later(self._run_s + LEAD_S, self._out_of_time)]
        if self._duration_s is not None:
            timers.append(self._loop.call_later(self._duration_s + LEAD_S, self._send_no_more))
        if isinstance(self._mode, OpenLoop):
            requests = self._script.requests
            self._heap = [(self.origin + requests[index].at, index) for index in openers]
            heapq.heapify(self._heap)
        else:
            slots = self._mode.concurrency
            self._heap = [(self.origin, index) for index in openers[:slots]]
            self._queue.extend(openers[slots:])
        try:
            if self._heap:
                self._alarm.set(self._heap[0][0])
            self._check_end()
            await self._finished
        finally:
            for timer in timers:
                timer.cancel()
            self._alarm.close()
            self._client.close()

    def stop(self) -> None:
        """End at once: cancel requests in flight, drop unsent ones."""
        self._send_no_more()
        self._client.end_all("cancelled", "interrupted", "the run was stopped")
        self._check_end()

    def _due(self) -> None:
        """Send what is due, then wait for the next due time or, at the cap, for a request to end."""
        heap = self._heap
        while heap and heap[0][0] <= now() + ENOUGH_S and self._has_room():
            due, index = heapq.heappop(heap)
            self._send(index, due)
        if heap and self._has_room():
            self._alarm.set(heap[0][0])

    def _has_room(self) -> bool:
        return self._cap is None or self._under_way < self._cap

    def _send_held(self) -> None:
        """A slot under the cap became free: send a waiting request. The wait is the server's, not the
        client's.
        """
        heap = self._heap
        while heap and heap[0][0] <= now() and self._has_room():
            due, index = heapq.heappop(heap)
            self._send(index, due, held_s=now() - due)
        if heap and self._has_room():
            self._alarm.set(heap[0][0])

    def _send(self, index: int, due: float, held_s: float = 0.0) -> None:
        sent = SentRequest(index, self._script.requests[index], due, self._script.keeps_text)
        sent.warmup, sent.held_s = self._warmup, held_s
        self._under_way += 1
        self.sent.append(sent)
        self._client.send(sent, self._bodies.take(index))
        if self._bodies.coming:
            self._loop.call_soon(self._bodies.refill)

    def _ended(self, sent: SentRequest) -> None:
        self._told(sent)
        self._under_way -= 1
        if self._is_stopped:
            self._check_end()
            return
        ended = sent.t_end or now()
        follow = self._script.answered(sent) if sent.status == "ok" else None
        if sent.status != "ok":
            self._give_up(self._script.failed(sent.index), ended)
        if follow is not None:
            self._plan(ended + follow.think_s, follow.index)
        elif self._queue:
            self._plan(ended, self._queue.popleft())  # the slot is free from the answer's last byte on
        if self._cap is not None:
            self._send_held()
        self._check_end()

    def _plan(self, due: float, index: int) -> None:
        if due <= now() + ENOUGH_S and self._has_room():
            self._send(index, due)
            return
        heapq.heappush(self._heap, (due, index))
        if self._heap[0] == (due, index):
            self._alarm.set(due)

    def _give_up(self, turns: list[int], at: float) -> None:
        """Turns that depend on a failed answer: count as offered and failed."""
        for index in turns:
            sent = SentRequest(index, self._script.requests[index], at)
            sent.status, sent.t_end = "failed", at
            sent.cause, sent.error = "earlier_turn", "an earlier turn of the conversation failed"
            sent.warmup = self._warmup
            self.sent.append(sent)

    def _send_no_more(self) -> None:
        self._is_stopped = True
        self._heap.clear()
        self._queue.clear()
        self._check_end()

    def _out_of_time(self) -> None:
        self._send_no_more()
        self._client.end_all(
            "timeout", "run_timeout", "the run's time was over before the answer was complete"
        )
        self._check_end()

    def _check_end(self) -> None:
        if not (self._heap or self._queue or self._client.live or self._finished.done()):
            self._finished.set_result(None)


class _Bodies:
    """Requests as bytes, made ahead in due order."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.coming: deque[int] = deque()
        self._made: dict[int, bytes] = {}
        self._bytes = 0

    def begin(self, openers: list[int]) -> None:
        self.coming.extend(openers)
        while self.coming and self._bytes < AHEAD_BYTES:
            self._make()

    def take(self, index: int) -> bytes:
        body = self._made.pop(index, None)
        if body is None:
            return self._script.body(index)
        self._bytes -= len(body)
        return body

    def refill(self) -> None:
        """One, after one was sent: spreads the work evenly."""
        if self.coming and self._bytes < AHEAD_BYTES:
            self._make()

    def _make(self) -> None:
        index = self.coming.popleft()
        self._made[index] = body = self._script.body(index)
        self._bytes += len(body)
