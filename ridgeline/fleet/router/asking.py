"""Asking: finds a replica for a request and sends it there, and to another one if that fails.

Used by `Exchange` for the first answer and for each continuation of a stream. Moves are bounded for each
request, and for all requests together by two budgets: one for the deaths of replicas, one for errors. A
request that replicas may die of is refused (`Suspicion`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ridgeline.fleet.router.config import FleetTuning
from ridgeline.fleet.router.demand import ModelBook
from ridgeline.fleet.router.holding.held_requests import Excluded, HeldRequests, Hold, Place, Placed
from ridgeline.fleet.router.moving.move_budget import MoveBudget
from ridgeline.fleet.router.moving.suspicion import Suspicion
from ridgeline.fleet.router.replica import Replica
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.breaker import Pass
from ridgeline.proxy.errors import Cause, RequestBroken
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.json_fields import raw, write_fields
from ridgeline.proxy.retry_budget import RetryBudget
from ridgeline.replica.resume import (
    ENGINE_DIED_HEADER,
    RESUMABLE_HEADER,
    RESUME_HEADER,
    ResumeState,
    with_state,
)

# Nothing was sent to the replica.
UNSENT = frozenset(("busy", "refused", "unresolved", "unreachable", "connect_timeout", "tls"))
# The request itself has ended: no other replica is asked.
FINAL = frozenset(("aborted", "total_timeout", "body_too_large", "head_too_large", "upload_lost", "busy"))
# The replica has ended or stalled: all of its requests move.
DEATHS = frozenset(("refused", "unreachable", "connect_timeout", "reset", "truncated", "no_progress"))
# Of these, those that a request may have caused: it had been sent.
KILLS = frozenset(("reset", "truncated", "no_progress"))
EXECUTED = frozenset((500, 502, 504))  # the replica may have computed the request
PASSING = frozenset((429, 500, 502, 503, 504))  # another replica may answer
RESUMABLE = (RESUMABLE_HEADER.encode(), b"1")
RESUME = (RESUME_HEADER.encode(), b"1")
ENGINE_DIED = ENGINE_DIED_HEADER.encode()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Means:
    """The state that all requests of a router share."""

    client: HttpClient
    tuning: FleetTuning
    timeouts: Timeouts
    clock: Callable[[], float]
    place: Place
    give_back: Callable[[Placed], None]
    key_lines: Callable[[], bytes]
    moves: MoveBudget  # after a replica's death
    retries: RetryBudget  # after a 5xx or a timeout
    sent: Callable[[str, str], None]  # called with a request's id and its replica
    first_token: Callable[[Placed], None]  # called when the prompt is computed
    proven: Callable[[Placed], None]  # called when the replica has survived a suspect


class Asking:
    """One request. `inner` is the answer of its current replica."""

    def __init__(
        self, means: Means, request: FleetRequest, prompt: PromptView, held: HeldRequests, book: ModelBook
    ) -> None:
        self.means, self.request, self.book = means, request, book
        self.hold = Hold()
        self.inner: UpstreamAnswer | None = None
        self.placed: Placed | None = None
        self.is_over = False
        self.is_proven = False  # as Suspicion.is_proven; read for every token
        self._prompt, self._held = prompt, held
        self._next: Placed | None = None  # already found when its replica refused the request
        self._excluded = Excluded()
        self._suspicion = Suspicion()
        self._left: Replica | None = None  # its last replica
        self._moves = 0
        self._has_answered = False

    @property
    def can_move(self) -> bool:
        return self._moves < self.means.tuning.migrations

    @property
    def has_seen_death(self) -> bool:
        return self._suspicion.deaths > 0

    def computed(self, tokens: int) -> None:
        """The replica has computed this many tokens of the answer. Called until `is_proven`."""
        suspicion = self._suspicion
        suspicion.tokens += tokens
        self.is_proven = suspicion.is_proven
        if suspicion.is_suspect and self.is_proven and self.placed is not None:
            self.means.proven(self.placed)

    def replica_failed(self, cause: Cause) -> None:
        if self.inner is not None:
            self.inner.fail(cause)

    def end(self, outcome: str) -> None:
        """Count the outcome, exactly once: ok, failed, refused or cancelled."""
        if self.is_over:
            return
        self.is_over = True
        self.book.outcomes[outcome] += 1
        self._drop_next()
        self.leave(exclude=False, error=None if outcome == "cancelled" else outcome == "failed")

    async def ask(self, state: ResumeState | None = None) -> UpstreamAnswer:
        """The answer of the first replica that begins one. state: of a stream to continue."""
        while True:
            await self._find_place(state)
            try:
                inner = await self._send(state)
            except RequestBroken as error:
                self.after_break(error.cause)
                if not self.may_move(error.cause, state is not None):
                    raise
                continue
            if not self._is_refused(inner, state is not None):
                return inner
            inner.abort()

    async def _find_place(self, state: ResumeState | None) -> None:
        request, held, means, excluded = self.request, self._held, self.means, self._excluded
        placed, self._next = self._next, None
        is_moved = bool(excluded.failed) or state is not None
        only = self._prompt.only
        excluded.version = "" if state is None or state.head is None else state.head.version
        excluded.is_suspect = self._suspicion.is_suspect
        # A new request does not overtake those that wait.
        if placed is None and (is_moved or not (held.movable or (only and held.waits_for(only)))):
            placed = means.place(self._prompt, excluded)
        if placed is not None:
            held.started(self._prompt, request.weight)
        else:
            self.book.held += not self.hold.waited_s
            before = self.hold.waited_s
            try:
                placed = await held.wait(
                    self._prompt,
                    request.weight,
                    request.until,
                    self.hold,
                    excluded,
                    is_moved,
                    request.is_accepted or excluded.is_suspect,  # suspects wait for each other
                )
            finally:
                self.book.held_s += self.hold.waited_s - before
        self.placed, self._has_answered = placed, False
        self._suspicion.tokens, self.is_proven = 0, False
        placed.replica.begin(self)

    async def _send(self, state: ResumeState | None) -> UpstreamAnswer:
        request, means, placed = self.request, self.means, self.placed
        assert placed is not None
        replica = placed.replica
        headers, body = request.headers, request.body
        if request.stream:
            headers = [*headers, RESUMABLE]
        if request.fields and not replica.knows(request.model):
            assert replica.started is not None
            body = write_fields({**request.fields, "model": raw(replica.started.model)})
        if state is not None:
            assert isinstance(body, bytes)
            headers, body = [*headers, RESUME], with_state(body, state)
        if request.request_id:
            means.sent(request.request_id, replica.id)
        inner = await means.client.ask(
            replica.origin,
            request.method,
            request.path,
            headers,
            body,
            timeouts=means.timeouts,
            until=request.until,
            fixed=means.key_lines(),
            wait_for_body=True,
            stream=request.stream,
            on_made=self._made,  # a replica that stands still may never send a byte
        )
        if inner.header(ENGINE_DIED) is not None:  # the server lives, and starts another engine
            inner.abort()
            raise RequestBroken("reset")
        if inner.status < 500:
            replica.breaker.success(placed.given)
            self._has_answered = True
        return inner

    def _made(self, inner: UpstreamAnswer) -> None:
        self.inner = inner

    # ── moving to another replica ──

    def _is_refused(self, inner: UpstreamAnswer, resuming: bool) -> bool:
        """Whether another replica is asked after this one answered with an error."""
        status = inner.status
        if status < 400 or (status not in PASSING and not resuming):
            return False
        if resuming:
            if status == 409:  # it runs another version, and refuses before it computes anything
                assert self.placed is not None
                self._excluded.refused.add(self.placed.replica.id)
                self.leave()
                return True
            self.leave(fault=status >= 500, error=status >= 500)
            if status in PASSING and self.may_move(f"http_{status}", resuming):
                return True
            raise RequestBroken("unresumable")
        if self._prompt.only or (status in EXECUTED and not self.request.repeatable):
            return False
        assert self.placed is not None
        failed = {*self._excluded.failed, self.placed.replica.id}
        self._next = self.means.place(self._prompt, replace(self._excluded, failed=failed))
        if self._next is None or not self.may_move(f"http_{status}", resuming):
            self._drop_next()
            return False
        # A draining or full replica is not a failed one.
        is_fault = status not in (429, 503)
        self.leave(fault=is_fault, error=is_fault or None)
        return True

    def may_move(self, cause: str, resuming: bool) -> bool:
        """Whether the request goes to another replica; if so, counts the move and charges its budget.

        RequestBroken ("quarantined") if replicas may have died of it.
        """
        means, request = self.means, self.request
        if self._suspicion.is_quarantined:
            raise RequestBroken("quarantined")
        if cause in FINAL or self.is_over or self._moves >= means.tuning.migrations:
            return False
        was_executed = cause not in UNSENT and not cause.startswith("http_")
        if was_executed and not (request.repeatable or resuming):
            return False
        left, is_death = self._left, cause in DEATHS or cause == "stale"
        if not (means.moves.take(left) if is_death and left is not None else means.retries.take()):
            return False
        self._moves += 1
        self.book.moves[cause] += 1
        return True

    def after_break(self, cause: Cause) -> None:
        """Settle with a replica whose connection broke, or that the router gave up."""
        if cause == "aborted":
            self.leave(exclude=False)
        elif cause in FINAL:
            self.leave(exclude=False, error=True)
        elif cause == "stale":
            self.leave(exclude=False)
        else:
            if cause in KILLS:
                self._replica_died()
            self.leave(fault=True, trip=cause in DEATHS, error=True)

    def _replica_died(self) -> None:
        placed, suspicion = self.placed, self._suspicion
        if placed is None:
            return
        suspicion.died(placed.replica.others_moved(self) if self.has_seen_death else 0)
        if suspicion.is_quarantined:
            self.book.quarantined += 1
            log.error(
                "request %s is refused: %d replicas in a row died with it, the last one was %s",
                self.request.request_id or "without an id", suspicion.deaths, placed.replica.id,
            )  # fmt: skip

    def leave(
        self, *, fault: bool = False, trip: bool = False, exclude: bool = True, error: bool | None = None
    ) -> None:
        """The request has left its replica. error: how it counts for the version; None: it does not count."""
        placed, self.placed, self.inner = self.placed, None, None
        if placed is None:
            return
        replica, given = placed.replica, Pass.YES if self._has_answered else placed.given
        self._left = replica
        if fault:
            replica.failed(given, trip)
        elif not self._has_answered:
            replica.breaker.abandon(given)
        if exclude:
            self._excluded.failed.add(replica.id)
        if error is not None:
            self.book.ended(replica.entry.version, error)
        replica.end(self)
        self._held.ended(self._prompt)
        self.means.give_back(placed)

    def _drop_next(self) -> None:
        placed, self._next = self._next, None
        if placed is not None:
            placed.replica.breaker.abandon(placed.given)
            self.means.give_back(placed)
