"""FleetRouter: a fleet as one upstream, in a router process or in a gateway's worker, so with one hop.

It follows the controller's table and each replica's feed, chooses a replica for every request, holds requests
while none has room, and reports demand. Without the controller it keeps serving with the last table.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from time import monotonic

from ridgeline.fleet.messages import ModelEntry, Table
from ridgeline.fleet.placement.regions import Rules, all_allow, with_rule
from ridgeline.fleet.router import own_answers
from ridgeline.fleet.router.asking import Asking, Means
from ridgeline.fleet.router.config import FleetTuning
from ridgeline.fleet.router.control_link import ControlLink
from ridgeline.fleet.router.demand import ModelBook
from ridgeline.fleet.router.exchange import Exchange
from ridgeline.fleet.router.holding.held_queues import HeldQueues
from ridgeline.fleet.router.holding.held_requests import NONE, Excluded, Placed
from ridgeline.fleet.router.moving.move_budget import MoveBudget
from ridgeline.fleet.router.prompt_view import prompt_view
from ridgeline.fleet.router.replica import Replica, rest
from ridgeline.fleet.router.replica_feed import ReplicaFeed
from ridgeline.fleet.router.reports import Reports
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.fleet.router.stored_responses import check_serves, storing_replica
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.choose import Choice, choose
from ridgeline.fleet.routing.policy import Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.fleet.routing.regions import IN_SERVICE, Regions
from ridgeline.options import OptionError
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.breaker import BreakerLimits
from ridgeline.proxy.errors import NoReplica
from ridgeline.proxy.http_client import NEVER, HttpClient, Timeouts
from ridgeline.proxy.origin import Origin
from ridgeline.proxy.request_head import header_lines
from ridgeline.proxy.retry_budget import RetryBudget

TICK_S = 0.25
REMOVED_S = 60.0  # Retry-After of requests that waited for a model that was removed
TABLE_S = 10.0  # seconds that a request waits for the first table
FOLLOWED = ("ramping", "ready", "draining")  # states of replicas whose feeds are read
REMEMBERED = 20_000  # latest requests whose replicas are remembered, for reports of their usage

log = logging.getLogger(__name__)


class FleetRouter:
    """One per event loop. `start` before the first request, `stop` after the last.

    control: the controller's socket or address. lines: header lines with its token. region: where it runs.
    """

    def __init__(
        self,
        control: Origin,
        *,
        lines: bytes = b"",
        tuning: FleetTuning | None = None,
        client: HttpClient | None = None,
        name: str = "router",
        region: str = "",
        clock: Callable[[], float] = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        tuning = self.tuning = tuning or FleetTuning()
        self.name = f"{name}-{secrets.token_hex(4)}"
        self.book, self.prefixes = LoadBook(clock), PrefixMap()
        self.replicas: dict[str, Replica] = {}
        self.books: dict[str, ModelBook] = {}  # by model
        self.regions = Regions(region, self.replicas, clock)
        self.held = HeldQueues(self.book, self._place, self._give_back, clock)
        self.control = ControlLink(client or HttpClient(), control, lines, self._on_table)
        self._client, self._owns_client = self.control.client, client is None
        self._clock, self._rng = clock, rng or random.Random()
        self._breaker = BreakerLimits(2, 0.5, 10.0, tuning.inhibit_s, tuning.inhibit_max_s)
        self._suspects: set[Replica] = set()
        self._feeds: dict[str, ReplicaFeed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # tasks of the feeds, by replica
        self._own_tasks: list[asyncio.Task[None]] = []
        self._policies: dict[str, Policy] = {}
        self._key_lines = b""
        self._key = ""
        self._has_table = asyncio.Event()
        self._asked_of: OrderedDict[str, str] = OrderedDict()  # request id → replica
        self._reports = Reports(
            self.name, self.control, self.books, self.held, self.book, tuning.demand_s, clock
        )
        self._moves = MoveBudget(clock, self._own_moves)
        self._retries = RetryBudget(tuning.retry_ratio, 1.0, clock)
        self._means = Means(
            self._client,
            tuning,
            Timeouts(tuning.connect_timeout_s, tuning.first_byte_timeout_s, tuning.idle_timeout_s),
            clock,
            self._place,
            self._give_back,
            lambda: self._key_lines,
            self._moves,
            self._retries,
            self._remember,
            lambda placed: self.book.first_token(placed.ticket),
            self._end_trial,
        )

    def start(self) -> None:
        if not self._own_tasks:
            jobs = (self.control.follow(), self._tick(), self._reports.run())
            self._own_tasks = [asyncio.get_running_loop().create_task(job) for job in jobs]

    async def stop(self) -> None:
        """End feeds and held requests. The caller ends running answers."""
        self.held.fail_all(NoReplica("the router is shutting down", 1.0))
        tasks = [*self._own_tasks, *self._tasks.values()]
        self._own_tasks, self._tasks = [], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._owns_client:
            self._client.close()

    async def ask(self, request: FleetRequest) -> UpstreamAnswer:
        """Returns the answer once its body has begun. An unknown model is answered with 404.

        Raises QueueRefused (full, or waited too long), NoReplica (none became ready), RequestBroken (the
        replicas failed) and InvalidBody.
        """
        if not self._has_table.is_set():
            await self.await_table(request.until)
        entry = self.book.models.get(request.model)
        if entry is None:
            return own_answers.unknown_model(request, self.book.models, self._clock())
        book = self.books[entry.name]
        rules = self.regions.rules_of(entry, request.residency)
        prompt = prompt_view(
            request.fields, request.model, entry, request.tenant, request.priority, self.regions.own, rules
        )
        if only := storing_replica(request, entry.name, self.replicas, rules):
            prompt = replace(prompt, only=only)
        if not request.is_counted:
            book.arrived += 1
            book.prompt_tokens += prompt.tokens
        for budget in (self._moves, self._retries, self.regions.failover):
            budget.request()
        held = self.held.of(entry.name, rules)
        if held.is_cold and not held.movable:
            self._reports.now()  # the controller must start a replica
        return await Exchange(Asking(self._means, request, prompt, held, book)).open()

    # ── for metrics, health and listings ──

    @property
    def has_table(self) -> bool:
        return self._has_table.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether a request can be answered: by a ready replica, or by one that the controller will start."""
        return self.has_table and bool(self.book.models)

    def models(self) -> list[ModelEntry]:
        return list({entry.name: entry for entry in self.book.models.values()}.values())

    def names(self) -> list[str]:
        """The names that a request may use: models, aliases and adapters."""
        return [name for one in self.models() for name in (one.name, *one.aliases, *one.adapters)]

    def listing(self, path: str) -> UpstreamAnswer:
        """The answer to GET /v1/models. A fleet serves no other objects."""
        return own_answers.listing(path, self.names(), self._clock())

    def replica_of(self, request_id: str) -> tuple[Origin, bytes] | None:
        """The replica of a request's last try, and the header lines with the key."""
        replica = self.replicas.get(self._asked_of.get(request_id, ""))
        return None if replica is None else (replica.origin, self._key_lines)

    def is_cold(self, model: str, residency: Rules = ()) -> bool:
        """Whether no replica in an allowed region may take the model's requests. residency: of a request."""
        return not self.book.candidates(model, with_rule(residency, self.book.models[model].residency))

    @property
    def gaps(self) -> int:
        return sum(feed.gaps for feed in self._feeds.values())

    @property
    def refused_by_budget(self) -> dict[str, int]:
        """How many moves after a replica's death, and how many retries."""
        return {"move": self._moves.refused, "retry": self._retries.refused}

    # ── choosing ──

    def _place(self, prompt: PromptView, excluded: Excluded = NONE) -> Placed | None:
        """Choose a replica that can take the request now, and charge it. Raises as `check_serves`."""
        now, failed = self._clock(), excluded.failed
        entry = self.book.models.get(prompt.model)
        if entry is None:
            return None
        barred = self._barred(excluded)
        never = self.inhibited() | barred
        residency = with_rule(prompt.residency, entry.residency)
        if residency is not prompt.residency:  # a newer table has another rule
            prompt = replace(prompt, residency=residency)
        if prompt.only:
            check_serves(self.replicas.get(prompt.only), residency)
        policy = self._policy(entry.policy)

        def chosen(exclude: Collection[str]) -> Choice | None:
            return choose(self.book, self.prefixes, prompt, policy, self._rng, now, exclude)

        choice = self.regions.choose_again(chosen, entry.name, failed, never) if failed else chosen(never)
        if (
            choice is None
            and failed
            and (prompt.only or self._only(entry.name, {*failed, *barred}, prompt.residency))
        ):
            # No other replica is left: one that failed the request may work again.
            choice = chosen(never)
        if choice is None:
            return None
        replica = self.replicas[choice.replica_id]
        ticket = self.book.charge(choice.replica_id, prompt, choice.matched_blocks)
        if excluded.is_suspect:
            replica.trial = ticket
        self.prefixes.routed(choice.replica_id, prompt.blocks, now)
        return Placed(replica, ticket, choice, replica.breaker.admit())

    def inhibited(self) -> set[str]:
        """Replicas that failed recently."""
        if not self._suspects:
            return set()
        self._suspects.difference_update([one for one in self._suspects if one.breaker.is_closed])
        return {one.id for one in self._suspects if not one.breaker.may_admit()}

    def _only(self, model: str, exclude: Collection[str], rules: Rules) -> bool:
        """Whether these include every replica of the model that is in service and allowed."""
        return all(
            one.id in exclude or one.is_lost or not all_allow(rules, one.entry.region)
            for one in self.replicas.values()
            if one.entry.model == model and one.entry.state in IN_SERVICE
        )

    def _barred(self, excluded: Excluded) -> set[str]:
        """Replicas that may not take the request, whatever their load."""
        barred = set(excluded.refused)
        if excluded.version:
            others = (one for one in self.replicas.values() if one.version not in ("", excluded.version))
            barred.update(one.id for one in others)
        if excluded.is_suspect:
            barred.update(one.id for one in self.replicas.values() if one.has_trial())
        return barred

    def _give_back(self, placed: Placed) -> None:
        self.book.discharge(placed.ticket)
        self._end_trial(placed)
        self.held.wake(placed.replica.entry.model)

    def _end_trial(self, placed: Placed) -> None:
        """The replica has survived a suspect, or the suspect has left: it may take the next one."""
        if placed.replica.trial is placed.ticket:
            placed.replica.trial = None
            self.held.wake(placed.replica.entry.model)

    def _own_moves(self) -> float:
        """Moves that the running requests may make, and the one that asks."""
        return self.tuning.migrations * (self.book.in_flight() + self.held.waiting + 1)

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
            self.held.configure(entry)
        for name in self.held.keep({entry.name for entry in table.models}, REMOVED_S):
            del self.books[name]
        self._set_replicas(table)
        self._has_table.set()
        self._reports.now()  # a drain waits until every router has this table
        for entry in table.models:
            self.held.wake(entry.name)

    def _set_replicas(self, table: Table) -> None:
        entries = {entry.id: entry for entry in table.replicas}
        for gone in self.replicas.keys() - entries.keys():
            self._unfollow(gone)
            self._suspects.discard(self.replicas.pop(gone))
        for entry in table.replicas:
            replica = self.replicas.get(entry.id)
            if replica is None:
                if not entry.url:
                    continue  # a starting replica has no address
                try:
                    replica = self.replicas[entry.id] = Replica(
                        entry, self._breaker, self._clock, self._suspects, self.tuning.longest_step_s
                    )
                except OptionError as error:
                    log.error("ignored a replica of the table: %s", error)
                    continue
            replica.entry = entry
            if entry.state == "lost":
                self._unfollow(entry.id)
                replica.lost_at = self._clock()
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
            on_load=partial(self.held.wake, replica.entry.model),
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
                "the router has no table of replicas yet: its controller does not answer", 5.0
            ) from None

    # ── beside the requests ──

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
        self._moves.settle()
        self.held.tick()


def bearer_lines(token: str) -> bytes:
    return header_lines([(b"authorization", b"Bearer " + token.encode())]) if token else b""
