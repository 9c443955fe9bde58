"""Exchange: one request at the fleet, from its first replica to the end of its answer.

The caller reads an UpstreamAnswer that outlives replicas. A whole answer is read here completely, so that a
peer can be asked again. A stream has markers (`replica.resume`): when its replica fails, a peer continues it
from the tokens that the client has. What cannot be continued fails with RequestBroken, and the caller tells
its client; it never looks like a complete answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.fleet.router.config import FleetTuning
from ridgeline.fleet.router.demand import ModelBook
from ridgeline.fleet.router.held import HeldRequests, Hold, Place, Placed
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.errors import Cause, ProxyError, RequestBroken
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.json_fields import raw, write_fields
from ridgeline.proxy.request_head import Headers
from ridgeline.proxy.retry_budget import RetryBudget
from ridgeline.replica.resume import (
    RESUMABLE_HEADER,
    RESUME_HEADER,
    BrokenMarkers,
    Failure,
    GroupReader,
    ResumeState,
    with_state,
)

# Nothing was sent to the replica.
UNSENT = frozenset(("busy", "refused", "unresolved", "unreachable", "connect_timeout", "tls"))
# The request's own end: no other replica is asked.
FINAL = frozenset(("aborted", "total_timeout", "body_too_large", "head_too_large", "upload_lost", "busy"))
# The replica is gone or stands still: its requests move, as many as it had.
DEATHS = frozenset(("refused", "unreachable", "connect_timeout", "reset", "truncated", "no_progress"))
PASSING = frozenset((429, 500, 502, 503, 504))  # another replica may answer
RESUMABLE = (RESUMABLE_HEADER.encode(), b"1")
RESUME = (RESUME_HEADER.encode(), b"1")
# Headers of a replica's answer that end here.
OWN_HEADERS = frozenset((RESUMABLE_HEADER.encode(), b"content-length"))

log = logging.getLogger(__name__)


class _Elsewhere(Exception):
    """The replica cannot go on, says so, and a peer may."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)


@dataclass(frozen=True, slots=True)
class Means:
    """What all requests of a router share."""

    client: HttpClient
    tuning: FleetTuning
    timeouts: Timeouts
    clock: Callable[[], float]
    place: Place
    give_back: Callable[[Placed], None]
    key_lines: Callable[[], bytes]
    moves: RetryBudget  # after a replica's death
    retries: RetryBudget  # after a 5xx or a timeout
    sent: Callable[[str, str], None]  # a request's id and its replica


class Exchange:
    """Source of the answer that the caller reads: pausing and dropping that answer comes here."""

    def __init__(
        self, means: Means, request: FleetRequest, prompt: PromptView, held: HeldRequests, book: ModelBook
    ) -> None:
        tuning = means.tuning
        self._means, self._request, self._prompt = means, request, prompt
        self._held, self._book = held, book
        self.hold = Hold()
        self._answer = UpstreamAnswer(
            tuning.first_byte_timeout_s, tuning.idle_timeout_s, request.until, True, request.stream
        )
        self._inner: UpstreamAnswer | None = None
        self._placed: Placed | None = None
        self._failed_by: set[str] = set()  # replicas
        self._moves = 0
        self._state = ResumeState()
        self._reader: GroupReader | None = None  # of a stream with markers
        self._task: asyncio.Task[None] | None = None
        self._is_over = self._has_first = False
        self._began = means.clock()

    async def open(self) -> UpstreamAnswer:
        """The answer, begun. Raises QueueRefused, NoReplica, or RequestBroken."""
        self._answer.attach(self, self._began)
        try:
            inner = await self._ask()
            self._answer.asked_at = inner.asked_at
            if self._request.stream and inner.status < 300:
                self._answer.feed_head(inner.status, self._headers(inner))
                self._reader = GroupReader() if _is_marked(inner) else None
                self._task = asyncio.get_running_loop().create_task(self._carry(inner))
                await self._answer.begin()
            else:
                await self._whole(inner)
        except ProxyError as error:
            self._end("refused" if not isinstance(error, RequestBroken) else "failed")
            raise
        except asyncio.CancelledError:
            self.drop()
            raise
        return self._answer

    # ── Source ──

    def pause(self) -> None:
        if self._inner is not None:
            self._inner.pause()

    def resume(self) -> None:
        if self._inner is not None:
            self._inner.resume()

    def drop(self) -> None:
        """The caller gave its answer up."""
        inner, self._inner = self._inner, None
        self._end("cancelled")
        if inner is not None:
            inner.abort()
        if self._task is not None:
            self._task.cancel()

    def replica_failed(self, cause: Cause) -> None:
        if self._inner is not None:
            self._inner.fail(cause)

    # ── asking replicas ──

    async def _ask(self, resuming: bool = False) -> UpstreamAnswer:
        """An answer that has begun, from the first replica that gives one."""
        while True:
            placed = await self._find_place(resuming)
            try:
                inner = await self._send(placed, resuming)
            except RequestBroken as error:
                self._after_break(error.cause)
                if not self._may_move(error.cause, sent=error.cause not in UNSENT, resuming=resuming):
                    raise
                continue
            if inner.status < 400 or not self._refused_by(inner, resuming):
                return inner
            inner.abort()

    async def _find_place(self, resuming: bool) -> Placed:
        request, held = self._request, self._held
        exclude = self._failed_by
        placed = None
        if exclude or not len(held):  # a new request does not overtake those that wait
            placed = self._means.place(self._prompt, exclude)
        if placed is None:
            self._book.held += not self.hold.waited_s
            before = self.hold.waited_s
            try:
                placed = await held.wait(self._prompt, request.weight, request.until, self.hold, exclude)
            finally:
                self._book.held_s += self.hold.waited_s - before
        self._placed = placed
        placed.replica.begin(self)
        held.queue.started(request.tenant, request.weight, self._means.clock())
        return placed

    async def _send(self, placed: Placed, resuming: bool) -> UpstreamAnswer:
        request, means = self._request, self._means
        headers, body, fields = request.headers, request.body, request.fields
        if request.stream:
            headers = [*headers, RESUMABLE]
        if fields and not placed.replica.knows(request.model):
            assert placed.replica.started is not None
            body = write_fields({**fields, "model": raw(placed.replica.started.model)})
        if resuming:
            assert isinstance(body, bytes)
            headers, body = [*headers, RESUME], with_state(body, self._state)
        if request.request_id:
            means.sent(request.request_id, placed.replica.id)
        inner = await means.client.ask(
            placed.replica.origin,
            request.method,
            request.path,
            headers,
            body,
            timeouts=means.timeouts,
            until=request.until,
            fixed=means.key_lines(),
            wait_for_body=True,
            stream=request.stream,
        )
        self._inner = inner
        return inner

    def _refused_by(self, inner: UpstreamAnswer, resuming: bool) -> bool:
        """The replica answered with an error: whether another one is asked."""
        placed, status = self._placed, inner.status
        assert placed is not None
        if resuming:  # 409: another version
            self._leave(status >= 500)
            if status in PASSING or status == 409:
                if self._may_move("reset", sent=False, resuming=True):
                    return True
            raise RequestBroken("unresumable")
        if status not in PASSING:
            return False
        if status == 500 and not self._request.repeatable:
            return False
        # A draining or full replica is not a failed one.
        may = self._moves < self._means.tuning.migrations and self._means.retries.take()
        if not may or not self._has_peer():
            return False
        if status in (500, 502, 504):
            placed.replica.failed(placed.given, trip=False)
        self._leave(status not in (429, 503))
        self._moved(f"http_{status}")
        return True

    def _has_peer(self) -> bool:
        """Whether a replica that has not failed the request can take it now."""
        assert self._placed is not None
        other = self._means.place(self._prompt, {*self._failed_by, self._placed.replica.id})
        if other is None:
            return False
        self._means.give_back(other)
        return True

    def _may_move(self, cause: str, *, sent: bool, resuming: bool) -> bool:
        tuning, request = self._means.tuning, self._request
        if cause in FINAL or self._is_over or self._moves >= tuning.migrations:
            return False
        if sent and not (request.repeatable or resuming):
            return False
        if cause not in DEATHS and cause != "stale" and not self._means.retries.take():
            return False
        if cause in DEATHS and not self._means.moves.take():
            return False
        self._moved(cause)
        return True

    def _moved(self, cause: str) -> None:
        self._moves += 1
        self._book.moves[cause] += 1

    def _after_break(self, cause: Cause) -> None:
        """Settle with the replica that failed."""
        placed = self._placed
        if placed is None:
            return
        if cause in FINAL or cause == "stale":
            placed.replica.breaker.abandon(placed.given)
        else:
            placed.replica.failed(placed.given, trip=cause in DEATHS)
            if cause != "stale":
                self._failed_by.add(placed.replica.id)
        self._leave(cause not in FINAL, settled=True)

    def _leave(self, error: bool, settled: bool = False) -> None:
        """The request is no longer at its replica."""
        placed, self._placed, self._inner = self._placed, None, None
        if placed is None:
            return
        if not settled:
            if error:
                placed.replica.failed(placed.given, trip=False)
            else:
                placed.replica.breaker.success(placed.given)
            self._failed_by.add(placed.replica.id)
        self._book.ended(placed.replica.entry.version, error)
        self._release(placed)

    def _release(self, placed: Placed) -> None:
        placed.replica.end(self)
        self._held.queue.ended(self._request.tenant, self._means.clock())
        self._means.give_back(placed)

    # ── the answer ──

    async def _whole(self, inner: UpstreamAnswer) -> None:
        """Read all of it: until then nothing has reached the client, and a peer can be asked."""
        limit = self._means.tuning.max_answer_bytes
        while True:
            try:
                body = await inner.read(limit)
                break
            except RequestBroken as error:
                self._after_break(error.cause)
                if not self._may_move(error.cause, sent=True, resuming=False):
                    raise
                inner = await self._ask()
        answer = self._answer
        answer.last_at = inner.last_at
        self._first_token(inner.status)
        answer.feed_head(inner.status, self._headers(inner))
        answer.feed(body)
        self._end("ok" if inner.status < 500 else "failed")
        answer.complete()

    async def _carry(self, inner: UpstreamAnswer) -> None:
        """Pass a stream on, over as many replicas as it needs."""
        answer = self._answer
        try:
            while True:
                cause = await self._relayed(inner)
                if cause is None:
                    self._end("ok" if self._state.failure is None else "failed")
                    answer.complete()
                    return
                self._after_break(cause)
                inner = await self._continue(cause)
                if answer.is_paused:
                    inner.pause()
        except RequestBroken as error:
            self._end("failed")
            answer.fail(error.cause)
        except ProxyError:
            self._end("failed")
            answer.fail("unresumable")
        except asyncio.CancelledError:
            self._end("cancelled")
            raise
        except Exception:
            log.exception("a stream could not be passed on")
            self._end("failed")
            answer.fail("garbage")

    async def _relayed(self, inner: UpstreamAnswer) -> Cause | None:
        """Why the replica did not finish the stream; None: it did."""
        self._inner = inner
        try:
            await inner.relay(self._pass_on)
        except RequestBroken as error:
            return error.cause
        except _Elsewhere:
            return "reset"
        except BrokenMarkers as error:
            log.error("a replica's stream has broken markers: %s", error)
            return "garbage"
        if self._reader is not None and not self._state.ended and self._state.failure is None:
            return "truncated"  # a clean end of the connection in the middle of the answer
        return None

    async def _continue(self, cause: Cause) -> UpstreamAnswer:
        """A peer's answer that goes on where the stream broke. Raises if there is none."""
        state = self._state
        if self._answer.first_at and not (self._reader is not None and state.may_continue):
            raise RequestBroken(cause)
        resuming = bool(self._answer.first_at)
        if not self._may_move(cause, sent=True, resuming=resuming):
            raise RequestBroken(cause)
        if resuming and state.head is not None:
            log.info("a stream continues on another replica after %s", cause)
        inner = await self._ask(resuming)
        self._reader = GroupReader() if _is_marked(inner) else None
        if resuming and self._reader is None:
            inner.abort()
            raise RequestBroken("unresumable")
        if inner.status >= 300:
            inner.abort()
            raise RequestBroken(cause)
        return inner

    def _pass_on(self, data: bytes) -> None:
        answer, reader = self._answer, self._reader
        if self._inner is not None:
            answer.last_at = self._inner.last_at
        if reader is None:
            if not self._has_first:
                self._first_token(200)
            answer.feed(data)
            return
        out = []
        for group in reader.feed(data):
            marker = group.marker
            if marker.failure is not None and marker.failure.elsewhere and self._can_move():
                if out:
                    answer.feed(b"".join(out))
                raise _Elsewhere(marker.failure)
            self._state.add(marker)
            if marker.t:
                if not self._has_first:
                    self._first_token(200)
                self._book.output_tokens += sum(len(tokens.ids) for tokens in marker.t)
            out.append(group.events)
        if out:
            answer.feed(out[0] if len(out) == 1 else b"".join(out))

    def _can_move(self) -> bool:
        return self._moves < self._means.tuning.migrations

    def _first_token(self, status: int) -> None:
        self._has_first = True
        placed = self._placed
        if placed is not None and status < 400 and self._answer.asked_at:
            self._book.first_token(placed.replica.entry.version, self._means.clock() - self._began)

    def _headers(self, inner: UpstreamAnswer) -> Headers:
        headers = [one for one in inner.headers if one[0] not in OWN_HEADERS]
        hold = self.hold
        if hold.position:
            headers.append((b"x-ridgeline-held-position", b"%d" % hold.position))
            headers.append((b"x-ridgeline-held-estimate-s", b"%.3f" % hold.estimate_s))
            headers.append((b"x-ridgeline-held-s", b"%.3f" % hold.waited_s))
        if self._placed is not None:
            headers.append((b"x-ridgeline-replica", self._placed.replica.id.encode("latin-1", "replace")))
        return headers

    def _end(self, outcome: str) -> None:
        """Exactly once."""
        if self._is_over:
            return
        self._is_over = True
        self._book.outcomes[outcome] += 1
        placed, self._placed = self._placed, None
        if placed is None:
            return
        if outcome == "ok":
            placed.replica.breaker.success(placed.given)
        else:
            with contextlib.suppress(Exception):
                placed.replica.breaker.abandon(placed.given)
        if outcome != "cancelled":
            self._book.ended(placed.replica.entry.version, error=outcome == "failed")
        self._release(placed)


def _is_marked(inner: UpstreamAnswer) -> bool:
    return inner.header(RESUMABLE_HEADER.encode()) is not None
