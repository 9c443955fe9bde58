"""Clients: the client side of a simulation: when each request reaches the engine, and what its client saw.

Open loops send at the planned times, closed ones when a slot is free; a conversation's turn follows the
previous answer, as in `bench.conversation`. Called by the simulation's loop; pure bookkeeping.
"""

from __future__ import annotations

import heapq
from collections import deque

from ridgeline.lab.bench.figures.record import RequestRecord, ServerTiming
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.traffic.request import Traffic
from ridgeline.telemetry.timing import TimingRecord


class Clients:
    """due: (moment at which it is in the engine's inbox, index), soonest first; a heap
    sent: when each request that is or was under way left its sender, a little after it was due
    """

    def __init__(self, traffic: Traffic, front: FrontTimes, concurrency: int | None) -> None:
        self._requests = traffic.requests
        self._front = front
        self._next_turn = _next_turns(traffic)
        self._records: list[RequestRecord | None] = [None] * len(traffic.requests)
        self.ended = 0  # requests with a record
        self.sent: dict[int, float] = {}
        self.due: list[tuple[float, int]] = []
        openers = [index for index, request in enumerate(self._requests) if request.turn == 0]
        self._queue: deque[int] = deque()  # closed loop: waiting for a slot
        if concurrency is not None:
            self._queue.extend(openers[concurrency:])
            openers = openers[:concurrency]
        self._closed = concurrency is not None
        for index in openers:
            self._send(index, 0.0 if self._closed else self._requests[index].at)

    def answered(self, index: int, timing: TimingRecord) -> None:
        """The engine has finished the request."""
        planned, front, sent = self._requests[index], self._front, self.sent[index]
        stamps = [at + front.chunk_s for at in timing.token_times]
        stamps[0] = timing.token_times[0] + front.first_s
        ended = stamps[-1] + front.end_s
        self._records[index] = RequestRecord(
            index=index,
            t_sched=sent - front.dispatch_s,
            t_send=sent,
            t_first=stamps[0],
            t_first_visible=stamps[0],
            t_last=stamps[-1],
            t_end=ended,
            status="ok",
            planned_in=planned.input_tokens,
            planned_out=planned.output_tokens,
            n_in=timing.prompt_tokens,
            n_cached=timing.cached_tokens,
            n_out=len(stamps),
            counted_by="usage",
            n_first=1,
            chunk_at=stamps,
            chunk_tokens=[1] * len(stamps),
            http_status=200,
            conversation=planned.conversation,
            turn=planned.turn,
            server=_server_timing(timing),
        )
        self.ended += 1
        following = self._next_turn.get(index)
        if following is not None:
            self._send(following, ended + self._requests[following].think_s)
        elif self._queue:
            self._send(self._queue.popleft(), ended)

    def refused(self, index: int, now: float, http_status: int, error: str) -> None:
        """The server did not accept it; later turns of the conversation are never sent."""
        self._records[index] = self._unanswered(index, self.sent[index], now, http_status, "refused", error)
        self.ended += 1
        following = self._next_turn.get(index)
        while following is not None:
            self.ended += 1
            self._records[following] = self._unanswered(following, now, None, None, "turn before failed", "")
            following = self._next_turn.get(following)
        if self._queue:
            self._send(self._queue.popleft(), now)

    def records(self) -> list[RequestRecord]:
        """In plan order; all have ended when nothing is due and the engine has no work."""
        return [record for record in self._records if record is not None]

    def _send(self, index: int, at: float) -> None:
        sent = self.sent[index] = at + self._front.dispatch_s
        heapq.heappush(self.due, (sent + self._front.to_engine(self._requests[index].input_tokens), index))

    def _unanswered(
        self, index: int, sched: float, ended: float | None, http_status: int | None, cause: str, error: str
    ) -> RequestRecord:
        planned = self._requests[index]
        return RequestRecord(
            index=index,
            t_sched=sched,
            t_send=None if ended is None else sched,
            t_first=None,
            t_first_visible=None,
            t_last=None,
            t_end=ended,
            status="cancelled" if ended is None else "failed",
            planned_in=planned.input_tokens,
            planned_out=planned.output_tokens,
            http_status=http_status,
            cause=cause,
            error=error or cause,
            conversation=planned.conversation,
            turn=planned.turn,
        )


def _next_turns(traffic: Traffic) -> dict[int, int]:
    following: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, request in enumerate(traffic.requests):
        if request.conversation is not None:
            if request.turn:
                following[last[request.conversation]] = index
            last[request.conversation] = index
    return following


def _server_timing(timing: TimingRecord) -> ServerTiming:
    return ServerTiming(
        queue_ms=_ms(timing.queue_s),
        ttft_ms=_ms(timing.ttft_s),
        tpot_ms=_ms(timing.tpot_s),
        inference_ms=_ms(timing.inference_s),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
