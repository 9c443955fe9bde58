"""RequestLog: the last requests as the console's timeline shows them, from their TimingRecords.

A request is noted when it begins and when it ends. What happens in between is read only while the console is
open. It holds times and counts, never text.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from ridgeline.server.served_models import ServedModels
from ridgeline.telemetry.timing import TimingRecord

KEPT = 2000
State = Literal["queued", "prefill", "decode", "done", "aborted", "failed"]
_ENDED: tuple[State, ...] = ("done", "aborted", "failed")


class RequestView(msgspec.Struct, omit_defaults=True, frozen=True):
    """One choice of a request. Times in ms after `at`, its arrival in Unix ms."""

    id: str
    model: str
    path: str
    at: float
    state: State
    prompt: int = 0
    cached: int = 0
    out: int = 0
    admitted: float | None = None
    chunks: tuple[float, ...] = ()  # launches of prefill steps
    first: float | None = None  # first output token
    last: float | None = None  # last output token
    end: float | None = None  # the engine ended it
    sent: float | None = None  # the last byte was handed to the socket
    tpot: float | None = None
    longest_gap: float | None = None  # between two output tokens
    preemptions: int = 0
    recomputed: int = 0
    drafted: int = 0
    accepted: int = 0
    reason: str = ""
    status: int = 0
    trace: str = ""


class Choices(Protocol):
    """What the log reads of a running request."""

    timings: dict[int, TimingRecord]

    @property
    def count(self) -> int: ...

    def output_tokens(self, index: int) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class LoggedRequest:
    id: str
    model: str
    path: str
    arrival: float
    prompts: tuple[int, ...]  # their tokens
    choices: Choices | None = None
    trace: str = ""

    def key(self, index: int, count: int) -> str:
        return self.id if count == 1 else f"{self.id}#{index}"


class RequestLog:
    def __init__(self, is_kept: bool = True, kept: int = KEPT) -> None:
        """is_kept: False where there is no console; nothing is kept then."""
        self._is_kept = is_kept
        self._open: dict[LoggedRequest, None] = {}
        self._ended: OrderedDict[str, RequestView] = OrderedDict()
        self._kept = kept
        self._unsent: dict[str, RequestView] = {}  # ended since the last call of `changes`
        self._told: dict[str, RequestView] = {}  # running ones, as last told
        self._wall = time.time() - time.monotonic()

    def begin(self, request: LoggedRequest) -> LoggedRequest:
        if self._is_kept:
            self._open[request] = None
        return request

    def refuse(self, request: LoggedRequest) -> None:
        """No engine accepted it."""
        self._open.pop(request, None)

    def end(self, request: LoggedRequest, status: int, timings: Sequence[TimingRecord]) -> None:
        if not self._is_kept:
            return
        self._open.pop(request, None)
        state: State = "done" if status == 200 else "aborted" if status == 499 else "failed"
        for index, timing in enumerate(timings):
            view = self._view(request, index, len(timings), state, timing, status)
            self._ended.pop(view.id, None)
            self._ended[view.id] = self._unsent[view.id] = view
            if len(self._ended) > self._kept:
                self._ended.popitem(last=False)
        while len(self._unsent) > self._kept:
            self._unsent.pop(next(iter(self._unsent)))

    def all(self, most: int = KEPT) -> list[RequestView]:
        """The last ones that ended, oldest first, then those that run."""
        return [*list(self._ended.values())[-most:], *self._running().values()]

    def changes(self) -> list[RequestView] | None:
        """Those that changed since the last call; None if none did."""
        running = self._running()
        changed = [view for key, view in running.items() if self._told.get(key) != view]
        self._told = running
        ended, self._unsent = list(self._unsent.values()), {}
        return [*ended, *changed] or None

    def _running(self) -> dict[str, RequestView]:
        found = {}
        for request in self._open:
            count = 1 if request.choices is None else request.choices.count
            timings: Mapping[int, TimingRecord] = {} if request.choices is None else request.choices.timings
            for index in range(count):
                timing = timings.get(index)
                state: State = "queued" if timing is None else "decode"
                out = 0 if request.choices is None else request.choices.output_tokens(index)
                view = self._view(
                    request, index, count, state, timing or TimingRecord(request.arrival), 0, out
                )
                found[view.id] = view
        return found

    def _view(
        self,
        request: LoggedRequest,
        index: int,
        count: int,
        state: State,
        timing: TimingRecord,
        status: int,
        out: int | None = None,
    ) -> RequestView:
        def after(moment: float | None) -> float | None:
            return None if moment is None else round((moment - request.arrival) * 1000, 1)

        per_prompt = max(count // max(len(request.prompts), 1), 1)
        prompt = request.prompts[min(index // per_prompt, len(request.prompts) - 1)] if request.prompts else 0
        has_ended = state in _ENDED
        gaps = timing.inter_token_s if has_ended else []
        return RequestView(
            id=request.key(index, count),
            model=request.model,
            path=request.path,
            at=round((self._wall + request.arrival) * 1000, 1),
            state=state,
            prompt=timing.prompt_tokens or prompt,
            cached=timing.cached_tokens,
            out=timing.output_tokens if out is None else out,
            admitted=after(timing.admitted),
            chunks=tuple(round((at - request.arrival) * 1000, 1) for at in timing.chunk_times),
            first=after(timing.first_token),
            last=after(timing.token_times[-1]) if has_ended and timing.token_times else None,
            end=after(timing.end),
            sent=after(timing.sent),
            tpot=None if timing.tpot_s is None else round(timing.tpot_s * 1000, 3),
            longest_gap=round(max(gaps) * 1000, 1) if gaps else None,
            preemptions=timing.preemptions,
            recomputed=timing.recomputed_tokens,
            drafted=timing.drafted_tokens,
            accepted=timing.accepted_tokens,
            reason=timing.end_reason,
            status=status,
            trace=request.trace,
        )


def request_log(served_models: ServedModels) -> RequestLog:
    """The server's log; made by `ServedModels.part`."""
    return RequestLog(served_models.config.console)
