"""FleetRouter: a fleet as one upstream. Runs in a router process and in a gateway's worker: one hop.

It follows the controller's table and each replica's feed, chooses a replica for every request, holds requests
while none has room, and reports demand. Without the controller it serves on with the last table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection
from time import monotonic
from typing import Any

import msgspec

from ridgeline.fleet.messages import Demand, ModelEntry, Table
from ridgeline.fleet.router.asking import Asking, Means
from ridgeline.fleet.router.config import FleetTuning
from ridgeline.fleet.router.control_link import ControlLink
from ridgeline.fleet.router.demand import ModelBook
from ridgeline.fleet.router.exchange import Exchange
from ridgeline.fleet.router.held import HeldRequests, Placed
from ridgeline.fleet.router.prompt_view import prompt_view
from ridgeline.fleet.router.replica import Replica, rest
from ridgeline.fleet.router.replica_feed import ReplicaFeed
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.choose import choose
from ridgeline.fleet.routing.policy import Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.options import OptionError
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.breaker import BreakerLimits
from ridgeline.proxy.error_bodies import error_body
from ridgeline.proxy.errors import NoReplica
from ridgeline.proxy.http_client import NEVER, HttpClient, Timeouts
from ridgeline.proxy.origin import Origin
from ridgeline.proxy.request_head import header_lines
from ridgeline.proxy.retry_budget import RetryBudget

TICK_S = 0.25
TABLE_S = 10.0  # a request waits this long for the first table
FOLLOWED = ("ramping", "ready", "draining")  # states of replicas whose feeds are read
MOST_MOVES = 10_000.0  # saved up for a replica's death: every request of it moves
REMEMBERED = 20_000  # replicas of the latest requests, for reports of their usage

log = logging.getLogger(__name__)


class FleetRouter:
    """One per event loop. `start` before the first request, `stop` after the last.

    control: the controller's socket or address. lines: header lines with its token.
    """

    def __init__(
        self,
        control: Origin,
        *,
        lines: bytes = b"",
        tuning: FleetTuning | None = None,
        client: HttpClient | None = None,
        name: str = "router",
        clock: Callable[[], float] = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        tuning = self.tuning = tuning or FleetTuning()
        self.name = f"{name}-{secrets.token_hex(4)}"
        self.book, self.prefixes = LoadBook(clock), PrefixMap()
        self.replicas: dict[str, Replica] = {}
        self.books: dict[str, ModelBook] = {}  # by model
        self.held: dict[str, HeldRequests] = {}
        self.control = ControlLink(client or HttpClient(), control, lines, self._on_table)
        self._client, self._owns_client = self.control.client, client is None
        self._clock, self._rng = clock, rng or random.Random()
        self._breaker = BreakerLimits(2, 0.5, 10.0, tuning.inhibit_s, tuning.inhibit_max_s)
        self._suspects: set[Replica] = set()
        self._feeds: dict[str, ReplicaFeed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of feeds
        self._own_tasks: list[asyncio.Task[None]] = []
        self._policies: dict[str, Policy] = {}
        self._key_lines = b""
        self._key = ""
        self._has_table, self._report_now = asyncio.Event(), asyncio.Event()
        self._asked_of: OrderedDict[str, str] = OrderedDict()  # request id → replica
        self._reported_at = clock()
        self._moves = RetryBudget(1.0, 1.0, clock, MOST_MOVES)
        self._retries = RetryBudget(tuning.retry_ratio, 1.0, clock)
        self._means = Means(
            self._client,
            tuning,
            Timeouts(tuning.connect_timeout_s, tuning.first_byte_timeout_s, tuning.idle_timeout_s),
            clock,
            self._place,
            self._give_back,
            lambda: self._key_lines,
            self._other_versions,
            self._moves,
            self._retries,
            self._remember,
            lambda placed: self.book.first_token(placed.ticket),
        )

    def start(self) -> None:
        if not self._own_tasks:
            jobs = (self.control.follow(), self._tick(), self._report())
            self._own_tasks = [asyncio.get_running_loop().create_task(job) for job in jobs]

    async def stop(self) -> None:
        """Ends feeds and held requests; running answers are the caller's."""
        for held in self.held.values():
            held.fail_all(NoReplica("the router is shutting down", 1.0))
        tasks = [*self._own_tasks, *self._tasks.values()]
        self._own_tasks, self._tasks = [], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._owns_client:
            self._client.close()

    async def ask(self, request: FleetRequest) -> UpstreamAnswer:
        """The answer, once its body has begun. An unknown model is answered with 404.

        Raises QueueRefused (full, or waited too long), NoReplica (none became ready), RequestBroken (the
        replicas failed) and InvalidBody.
        """
        if not self._has_table.is_set():
            await self.await_table(request.until)
        entry = self.book.models.get(request.model)
        if entry is None:
            return self._unknown(request)
        book = self.books[entry.name]
        prompt = prompt_view(request.fields, request.model, entry, request.tenant, request.priority)
        book.arrived += 1
        book.prompt_tokens += prompt.tokens
        self._moves.request()
        self._retries.request()
        held = self.held[entry.name]
        if held.is_cold and not len(held):
            self._report_now.set()  # the controller must start a replica: tell it at once
        return await Exchange(Asking(self._means, request, prompt, held, book)).open()

    # ── for metrics, health and listings ──

    @property
    def has_table(self) -> bool:
        return self._has_table.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether a request can be answered: by a replica that is ready, or by one that will be started."""
        return self.has_table and bool(self.book.models)

    def models(self) -> list[ModelEntry]:
        return list({entry.name: entry for entry in self.book.models.values()}.values())

    def names(self) -> list[str]:
        """Everything that a request may name: models, aliases and adapters."""
        return [name for one in self.models() for name in (one.name, *one.aliases, *one.adapters)]

    def listing(self, path: str) -> UpstreamAnswer:
        """The answer to GET /v1/models; other objects are not served by a fleet."""
        if path == "/v1/models":
            cards = [model_card(name) for name in self.names()]
            return self._own_answer(200, msgspec.json.encode({"object": "list", "data": cards}))
        message = "a fleet keeps no objects: a file would lie on one replica"
        return self._own_answer(404, error_body("openai", 404, "invalid_request_error", message))

    def replica_of(self, request_id: str) -> tuple[Origin, bytes] | None:
        """Where a request was last sent, and the header lines with the key."""
        replica = self.replicas.get(self._asked_of.get(request_id, ""))
        return None if replica is None else (replica.origin, self._key_lines)

    @property
    def gaps(self) -> int:
        return sum(feed.gaps for feed in self._feeds.values())

    @property
    def budgets(self) -> tuple[RetryBudget, RetryBudget]:
        """Of moves after a replica's death, and of retries."""
        return self._moves, self._retries

    # ── choosing ──

    def _place(
        self, prompt: PromptView, failed: Collection[str] = (), barred: Collection[str] = ()
    ) -> Placed | None:
        """A replica that can take the request now, charged with it."""
        now, never = self._clock(), self._inhibited().union(barred)
        entry = self.book.models.get(prompt.model)
        if entry is None:
            return None
        policy = self._policy(entry.policy)
        exclude = never.union(failed) if failed else never
        choice = choose(self.book, self.prefixes, prompt, policy, self._rng, now, exclude)
        if choice is None and failed and self._only(entry.name, {*failed, *barred}):
            # No other replica is left: those that failed the request may have come back.
            choice = choose(self.book, self.prefixes, prompt, policy, self._rng, now, never)
        if choice is None:
            return None
        replica = self.replicas[choice.replica_id]
        ticket = self.book.charge(choice.replica_id, prompt, choice.matched_blocks)
        self.prefixes.routed(choice.replica_id, prompt.blocks, now)
        return Placed(replica, ticket, choice, replica.breaker.admit())

    def _inhibited(self) -> set[str]:
        """Replicas that failed a moment ago."""
        if not self._suspects:
            return set()
        self._suspects.difference_update([one for one in self._suspects if one.breaker.is_closed])
        return {one.id for one in self._suspects if not one.breaker.may_admit()}

    def _only(self, model: str, exclude: Collection[str]) -> bool:
        """Whether every replica of the model that is in service is among these."""
        return all(
            one.id in exclude or one.is_lost
            for one in self.replicas.values()
            if one.entry.model == model and one.entry.state in ("ready", "ramping")
        )

    def _give_back(self, placed: Placed) -> None:
        self.book.discharge(placed.ticket)
        held = self.held.get(placed.replica.entry.model)
        if held is not None:
            held.wake()

    def _policy(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            try:
                policy = Policy(name)  # type: ignore[arg-type]
            except ValueError as error:
                log.error("%s; using the default", error)
                policy = Policy()
            self._policies[name] = policy
        return policy

    def _other_versions(self, version: str) -> set[str]:
        return {one.id for one in self.replicas.values() if one.version and one.version != version}

    def _remember(self, request_id: str, replica_id: str) -> None:
        self._asked_of[request_id] = replica_id
        if len(self._asked_of) > REMEMBERED:
            self._asked_of.popitem(last=False)

    # ── the table ──

    def _on_table(self, table: Table) -> None:
        if not self.book.set_table(table):
            log.info("ignored table %d: older than %d", table.generation, self.book.generation)
            return
        if table.key != self._key:
            self._key = table.key
            self._key_lines = bearer_lines(table.key)
        for entry in table.models:
            self.books.setdefault(entry.name, ModelBook())
            held = self.held.get(entry.name)
            if held is None:
                self.held[entry.name] = HeldRequests(entry, self._place, self._give_back, self._clock)
            else:
                held.configure(entry)
        self._set_replicas(table)
        self._has_table.set()
        self._report_now.set()  # a drain waits until every router has this table
        self._wake()

    def _set_replicas(self, table: Table) -> None:
        entries = {entry.id: entry for entry in table.replicas}
        for gone in self.replicas.keys() - entries.keys():
            self._unfollow(gone)
            self._suspects.discard(self.replicas.pop(gone))
        for entry in table.replicas:
            replica = self.replicas.get(entry.id)
            if replica is None:
                if not entry.url:
                    continue  # it has no address yet
                try:
                    replica = self.replicas[entry.id] = Replica(
                        entry, self._breaker, self._clock, self._suspects
                    )
                except OptionError as error:
                    log.error("a replica of the table is ignored: %s", error)
                    continue
            replica.entry = entry
            if entry.state == "lost":
                self._unfollow(entry.id)
                replica.end_running("reset")
            elif entry.state in FOLLOWED and entry.id not in self._tasks:
                self._follow(replica)

    def _follow(self, replica: Replica) -> None:
        feed = ReplicaFeed(
            replica,
            self._client,
            self.book,
            self.prefixes,
            key_lines=lambda: self._key_lines,
            silent_s=self.tuning.progress_s,
            on_load=self._wake,
        )
        self._feeds[replica.id] = feed
        self._tasks[replica.id] = asyncio.get_running_loop().create_task(feed.follow())

    def _unfollow(self, replica_id: str) -> None:
        task = self._tasks.pop(replica_id, None)
        if task is not None:
            task.cancel()
        self._feeds.pop(replica_id, None)
        self.prefixes.forget(replica_id)

    async def await_table(self, until: float) -> None:
        left_s = min(TABLE_S, until - monotonic() if until != NEVER else TABLE_S)
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                await self._has_table.wait()
        except TimeoutError:
            raise NoReplica(
                "the router has no table of replicas: its controller does not answer", 5.0
            ) from None

    # ── beside the requests ──

    def _wake(self) -> None:
        for held in self.held.values():
            held.wake()

    async def _tick(self) -> None:
        while True:
            await rest(TICK_S, self.replicas, self._clock)
            try:
                self._look()
            except Exception:
                log.exception("could not check the replicas")

    def _look(self) -> None:
        progress_s = self.tuning.progress_s
        for replica in self.replicas.values():
            stands_still = replica.stands_still(progress_s)
            if stands_still or replica.is_silent(progress_s):
                feed = self._feeds.get(replica.id)
                if feed is not None:
                    feed.lose()
                if stands_still:
                    replica.ejections += 1
                    log.warning("replica %s made no step for %g s; ejected", replica.id, progress_s)
                replica.end_running("no_progress")
        for name, held in self.held.items():
            held.tick(self.book.candidates(name) == 0)
            held.wake()

    async def _report(self) -> None:
        while True:
            # Not wait_for: in Python 3.11 it may swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.tuning.demand_s):
                    await self._report_now.wait()
            self._report_now.clear()
            if self.has_table:
                await self.control.post(self._demand())

    def _demand(self) -> Demand:
        now = self._clock()
        interval_s, self._reported_at = now - self._reported_at, now
        return Demand(
            self.name,
            interval_s,
            tuple(
                book.report(
                    name,
                    len(self.held[name]),
                    self.held[name].oldest_s(),
                    self.book.in_flight(model=name),
                )
                for name, book in self.books.items()
            ),
            max(self.book.generation, 0),
        )

    def _unknown(self, request: FleetRequest) -> UpstreamAnswer:
        known = ", ".join(sorted(self.book.models)) or "none"
        message = f"model: no model is named {request.model[:256]!r}; this fleet serves: {known}"
        family = "anthropic" if request.path.startswith("/v1/messages") else "openai"
        if request.path.startswith("/api/"):
            family = "ollama"
        kind = "invalid_request_error"
        body = error_body(family, 404, kind, message, "model", "model_not_found", request.request_id)
        return self._own_answer(404, body)

    def _own_answer(self, status: int, body: bytes) -> UpstreamAnswer:
        answer = UpstreamAnswer(NEVER, NEVER, NEVER, True, False)
        answer.asked_at = answer.last_at = self._clock()
        answer.feed_head(status, [(b"content-type", b"application/json")])
        answer.feed(body)
        answer.complete()
        return answer


def model_card(name: str) -> dict[str, Any]:
    """As in /v1/models."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "ridgeline"}


def bearer_lines(token: str) -> bytes:
    return header_lines([(b"authorization", b"Bearer " + token.encode())]) if token else b""
