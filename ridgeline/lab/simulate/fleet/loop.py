"""simulate_fleet(): the event loop of a fleet simulation: arrivals, replicas' steps, feeds, decisions.

Events are processed in order of time. A replica is advanced when it is due to end a request, when it gets a
request and when it reports its load; between these, whole runs of decode steps are computed at once.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace

from ridgeline.engine.kv.prefix_index import PrefixIndex
from ridgeline.fleet.messages import VersionOutcome
from ridgeline.fleet.placement.regions import between
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.fleet.scaling import DemandSample
from ridgeline.lab.simulate.clients import Clients
from ridgeline.lab.simulate.fleet.controller import SimulatedController
from ridgeline.lab.simulate.fleet.replica import SimulatedReplica, Watchers
from ridgeline.lab.simulate.fleet.result import FleetRun, Served
from ridgeline.lab.simulate.fleet.router import Dispatch, SimulatedRouter
from ridgeline.lab.simulate.fleet.setup import EXACT_REPLICAS, MODEL, FleetSetup
from ridgeline.lab.simulate.prompts import TokenPrompts
from ridgeline.lab.traffic.operations import first
from ridgeline.lab.traffic.request import Traffic
from ridgeline.replica.prompt_blocks import MAX_BLOCKS
from ridgeline.telemetry.timing import TimingRecord

QUIET_LOADS = 4  # an idle replica makes only one in this many reports

OnProgress = Callable[[int, int, float], None]  # requests ended, of all, simulated seconds


def simulate_fleet(traffic: Traffic, setup: FleetSetup, on_progress: OnProgress | None = None) -> FleetRun:
    """A fleet of more than EXACT_REPLICAS is projected from that number with their part of the load."""
    if setup.replicas <= EXACT_REPLICAS:
        return _FleetSimulation(traffic, setup, on_progress).run()
    factor = setup.replicas / EXACT_REPLICAS
    part = first(traffic, max(1, round(len(traffic.requests) / factor)))
    stretched = tuple(replace(request, at=request.at * factor) for request in part.requests)
    found = _FleetSimulation(
        replace(part, requests=stretched), replace(setup, replicas=EXACT_REPLICAS), on_progress
    ).run()
    return found.projected(factor)


class _FleetSimulation:
    def __init__(self, traffic: Traffic, setup: FleetSetup, on_progress: OnProgress | None) -> None:
        self.now = 0.0
        self._traffic, self._setup = traffic, setup
        self._on_progress = on_progress
        self._clients = Clients(traffic, setup.front, None)
        self._prompts = TokenPrompts(traffic)
        self._naming = PrefixIndex(setup.limits.block_size, setup.limits.model_salt)
        self._names: dict[bytes, int] = {}
        self._tokens: dict[int, list[int]] = {}  # prompts of requests that are not sent yet
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._started = 0
        self._rng = random.Random(f"{setup.seed} routers")
        self._served: dict[int, Served] = {}
        self._router_of: dict[int, SimulatedRouter] = {}
        self._arrived = self._prompt_tokens = self._output_tokens = 0
        self._outcomes: dict[str, list[float]] = {}
        self._turns = 0
        self._reports_at = setup.load_every_s  # the next regular lines
        watchers = Watchers(self._first_token, self._answered, self._refused)
        self._watchers = watchers
        self._routers = [SimulatedRouter(setup, n, lambda: self.now) for n in range(setup.routers)]
        self._known: set[str] = set()  # replicas whose feed is open
        self._controller = SimulatedController(setup, self._make)
        self._publish_table()

    def run(self) -> FleetRun:
        setup, clients = self._setup, self._clients
        self._at(self._reports_at, self._report_loads)
        self._at(setup.decide_every_s, self._decide)
        if setup.add_at_s is not None:
            self._at(setup.add_at_s, self._add_replica)
        total = len(self._traffic.requests)
        while clients.ended < total and (self._events or clients.due):
            if clients.due and (not self._events or clients.due[0][0] <= self._events[0][0]):
                at, index = heapq.heappop(clients.due)
                self.now = max(self.now, at)
                self._arrive(index)
            else:
                at, _, act = heapq.heappop(self._events)
                self.now = max(self.now, at)
                act()
        self._controller.count_cost(self.now)
        return self._result()

    def _at(self, at: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, act))

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────

    def _arrive(self, index: int) -> None:
        planned = self._traffic.requests[index]
        self._arrived += 1
        self._prompt_tokens += planned.input_tokens
        self._tokens[index] = tokens = self._prompts.prompt(index)
        view = PromptView(
            MODEL,
            blocks=self._name(tokens)
            if self._traffic.prefix_block_tokens or planned.conversation is not None
            else (),
            tokens=len(tokens),
            session="" if planned.conversation is None else str(planned.conversation),
            region=self._setup.region,
        )
        router = self._rng.choice(self._routers) if len(self._routers) > 1 else self._routers[0]
        self._router_of[index] = router
        dispatch, refused = router.arrived(index, view)
        for one in refused:
            self._refuse(one, 429, "the router's queue is full")
        if dispatch is not None:
            self._send(dispatch)

    def _name(self, tokens: list[int]) -> list[int]:
        """Names of the prompt's leading blocks, one for each `name_blocks` KV blocks, as a server reports."""
        hashes: list[bytes] = []
        every = self._setup.name_blocks
        size = self._setup.limits.block_size
        self._naming.extend(hashes, tokens, end=min(len(tokens), MAX_BLOCKS * every * size))
        named = hashes[every - 1 :: every]
        return [self._names.setdefault(hash, int.from_bytes(hash[:8], "little")) for hash in named]

    def _send(self, dispatch: Dispatch) -> None:
        index = dispatch.index
        planned = self._traffic.requests[index]
        replica = self._controller.replicas[dispatch.replica_id]
        replica.sent += 1
        self._served[index] = Served(
            index, replica.id, replica.version, self.now, self.now - replica.ready_at
        )
        tokens = self._tokens.pop(index)
        answer = self._prompts.answer_token(index)
        at = self.now + self._setup.router_s + self._distance_s(replica)
        replica.submit(index, tokens, planned.output_tokens, answer, at)
        self._wake(replica)
        self._at(at, lambda: self._report_early(replica))

    def _distance_s(self, replica: SimulatedReplica) -> float:
        own, region = self._setup.region, replica.place.region
        return between(self._setup.latency_ms, own, region) / 1000 if own and region else 0.0

    def _wake(self, replica: SimulatedReplica) -> None:
        """Advance it to now, and schedule its next event."""
        replica.advance(self.now)
        self._plan_wake(replica)

    def _plan_wake(self, replica: SimulatedReplica) -> None:
        replica.wakes += 1
        wake, at = replica.wakes, replica.next_at()
        if at is not None:
            # A step that begins now must be taken: `advance` takes those that begin before its argument.
            self._at(max(at, self.now), lambda: self._woken(replica, wake))

    def _woken(self, replica: SimulatedReplica, wake: int) -> None:
        if wake == replica.wakes:
            replica.advance(self.now + 1e-9)
            self._plan_wake(replica)

    def _first_token(self, replica: SimulatedReplica, index: int) -> None:
        router = self._router_of[index]

        def first() -> None:
            replica.first_token_out(index)
            router.first_token(index)

        self._at(replica.engine.now, first)

    def _answered(self, replica: SimulatedReplica, index: int, timing: TimingRecord) -> None:
        self._at(replica.engine.now, lambda: self._finish(replica, index, timing))

    def _finish(self, replica: SimulatedReplica, index: int, timing: TimingRecord) -> None:
        replica.sent -= 1
        replica.answer_out()
        self._output_tokens += len(timing.token_times)
        self._clients.answered(index, timing)
        ttft_ms = 1000 * (timing.token_times[0] - self._clients.sent[index])
        self._outcomes.setdefault(replica.version, []).append(ttft_ms)
        self._leave(index)

    def _refused(self, replica: SimulatedReplica, index: int, status: int, error: str) -> None:
        def refuse() -> None:
            replica.sent -= 1
            replica.answer_out()
            self._refuse(index, status, error)
            self._leave(index)

        self._at(replica.engine.now, refuse)

    def _refuse(self, index: int, status: int, error: str) -> None:
        self._tokens.pop(index, None)
        self._clients.refused(index, self.now, status, error)

    def _leave(self, index: int) -> None:
        router = self._router_of.pop(index)
        router.ended(index)
        self._send_held(router)
        if self._on_progress is not None and self._clients.ended % 50 == 0:
            self._on_progress(self._clients.ended, len(self._traffic.requests), self.now)

    def _send_held(self, router: SimulatedRouter) -> None:
        while (dispatch := router.next_held()) is not None:
            self._send(dispatch)

    # ── feeds and decisions ──────────────────────────────────────────────────────────────────────────────

    def _report_loads(self) -> None:
        self._turns += 1
        for replica in self._controller.replicas.values():
            if replica.id not in self._known:
                continue
            if replica.sent:
                self._wake(replica)
            elif (self._turns + replica.number) % QUIET_LOADS:
                continue
            self._report(replica)
        for router in self._routers:
            self._send_held(router)
            for index in router.expired():
                self._refuse(index, 503, "no replica took the request in time")
                self._router_of.pop(index, None)
        self._reports_at = self.now + self._setup.load_every_s
        self._at(self._reports_at, self._report_loads)

    def _report_early(self, replica: SimulatedReplica) -> None:
        """A request was accepted: its replica reports at once, or as soon as its pace allows."""
        due_at = replica.load_due_at()
        if due_at <= self.now:
            self._wake(replica)
            self._report(replica)
        elif not replica.will_report and due_at < self._reports_at:
            replica.will_report = True
            self._at(due_at, lambda: self._report_early(replica))

    def _report(self, replica: SimulatedReplica) -> None:
        lines = [*replica.take_events(), replica.load()]
        replica.pace.told(replica.accepted, self.now)
        replica.will_report = False
        for router in self._routers:
            for line in lines:
                router.hear(replica.id, line)

    def _decide(self) -> None:
        demand = DemandSample(
            arrived=self._arrived,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            held=sum(len(router.queue) for router in self._routers),
            in_flight=sum(router.in_flight for router in self._routers),
            heard_at=self.now,
        )
        self._arrived = self._prompt_tokens = self._output_tokens = 0
        outcomes = [
            VersionOutcome(version, len(samples), 0, tuple(samples[:64]))
            for version, samples in self._outcomes.items()
        ]
        self._outcomes = {}
        if self._controller.decide(demand, outcomes, self.now):
            self._publish_table()
        self._at(self.now + self._setup.decide_every_s, self._decide)

    def _add_replica(self) -> None:
        self._controller.add_ready(self.now)
        self._publish_table()

    def _publish_table(self) -> None:
        table = self._controller.table()
        for router in self._routers:
            router.set_table(table)
        serving = {id for id, replica in self._controller.replicas.items() if replica.state != "starting"}
        for id in serving - self._known:
            replica = self._controller.replicas[id]
            for router in self._routers:
                router.hear(id, replica.started())
                router.hear(id, replica.load())
        self._known = serving
        for router in self._routers:
            router.queue.set_cold(router.book.candidates(MODEL) == 0, self.now)
            self._send_held(router)

    def _make(self, version: str) -> SimulatedReplica:
        self._started += 1
        return SimulatedReplica(
            f"replica-{self._started}", self._setup, self._started, self._watchers, self._names, version
        )

    def _result(self) -> FleetRun:
        setup, controller = self._setup, self._controller
        return FleetRun(
            policy=setup.policy,
            records=self._clients.records(),
            served=self._served,
            duration_s=self.now,
            replicas=setup.replicas,
            replica_hours=controller.replica_s / 3600,
            cost=controller.replica_s / 3600 * setup.price_per_hour,
            decisions=controller.decisions,
            rollout="" if controller.rollout is None else controller.rollout.phase,
        )
