"""SimulatedReplica: a simulated engine with a server's feed: load reports and prefix events.

The event loop submits requests, advances it to a time, and asks for the time of its next visible event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.step import SeqDelta
from ridgeline.fleet.messages import ReplicaEntry, State
from ridgeline.lab.simulate.engine import SHORTEST_RUN, SimulatedEngine
from ridgeline.lab.simulate.fleet.setup import MODEL, FleetSetup
from ridgeline.replica.load_pace import LoadPace
from ridgeline.replica.messages import FeedLine, Load, Removed, Started, Stored
from ridgeline.telemetry.timing import TimingRecord

Ended = Callable[["SimulatedReplica", int, TimingRecord], None]
First = Callable[["SimulatedReplica", int], None]
Refused = Callable[["SimulatedReplica", int, int, str], None]


@dataclass(frozen=True, slots=True)
class Watchers:
    """Called at the replica's `now`, which may be after the time it was advanced to: a step takes time."""

    first: First
    ended: Ended
    refused: Refused


@dataclass(slots=True)
class _Submitted:
    at: float
    request: Request


class SimulatedReplica:
    """names: hash of a KV block → name of the prompt block that ends there, filled by the event loop."""

    def __init__(
        self,
        id: str,
        setup: FleetSetup,
        number: int,
        watchers: Watchers,
        names: dict[bytes, int],
        version: str,
    ) -> None:
        self.id, self.number, self.version = id, number, version
        self.state: State = "starting"
        self.place = setup.places[0]
        self.since = self.ready_at = 0.0
        self.wakes = 0  # the newest wake-up that counts
        self.sent = 0  # requests sent and not answered
        self.will_report = False  # before the next regular lines
        self._watchers, self._names = watchers, names
        self._limits, self._times = setup.limits, setup.times
        self._lookahead = setup.lookahead
        self._inbox: deque[_Submitted] = deque()
        self.engine = SimulatedEngine(
            setup.limits,
            setup.times,
            setup.lookahead,
            setup.seed + number,
            self._publish,
            setup.drafts,
        )
        self._waits_for_first: set[str] = set()
        self._queued: dict[int, int] = {}  # request → prompt tokens, until its first token is out
        self.pace = LoadPace()
        self._accepted = self._ended = 0
        self._seq = 0
        self._events: list[FeedLine] = []
        self._watch_index()

    def entry(self) -> ReplicaEntry:
        region, pool = self.place.key
        return ReplicaEntry(self.id, MODEL, "", self.state, self.id, self.version, region=region, pool=pool)

    def started(self) -> Started:
        limits = self._limits
        return Started(
            self.id,
            0,
            MODEL,
            (MODEL,),
            self.version,
            limits.max_running,
            limits.num_blocks,
            limits.block_size,
            {},
        )

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, index: int, tokens: list[int], output_tokens: int, answer_token: int, at: float) -> None:
        params = SamplingParams(max_tokens=max(output_tokens, 1), ignore_eos=True, seed=answer_token)
        self._accepted += 1
        self._queued[index] = len(tokens)
        self._inbox.append(_Submitted(at, Request(str(index), tokens, params, arrival=at)))

    def advance(self, until: float) -> None:
        """Take every step that begins before `until`."""
        engine = self.engine
        while True:
            while self._inbox and self._inbox[0].at <= engine.now:
                self._accept(self._inbox.popleft().request)
            due = self._inbox[0].at if self._inbox else float("inf")
            if not engine.scheduler.has_work:
                if due > until:
                    engine.now = max(engine.now, until)
                    return
                engine.now = due
            elif engine.now >= until:
                return
            elif not engine.fast_forward(min(until, due)):
                engine.iterate()

    def next_at(self) -> float | None:
        """When it may next end a request or compute a first token; None if it has no request.

        The time may be too early: `advance` to it and ask again.
        """
        engine = self.engine
        if not engine.scheduler.has_work:
            return self._inbox[0].at if self._inbox else None
        run = engine.scheduler.decode_run()
        if run is None or run.iterations < SHORTEST_RUN:
            return engine.now
        count, batch = run.iterations, len(run.sequences)
        base, per_context = self._times.decode_line(batch)
        if not self._lookahead:
            base += self._times.host.schedule(batch) + self._times.host.turn(batch)
        seconds = count * base + per_context * (count * run.context + batch * count * (count - 1) / 2)
        run_ends = engine.now + seconds * (1 - 1e-9)
        return min(run_ends, self._inbox[0].at) if self._inbox else run_ends

    def _accept(self, request: Request) -> None:
        try:
            self.engine.scheduler.add(request)
        except (QueueFull, InvalidRequest) as error:
            status = 429 if isinstance(error, QueueFull) else 400
            self._queued.pop(int(request.request_id))
            self._watchers.refused(self, int(request.request_id), status, str(error))
            return
        self._waits_for_first.add(request.request_id)

    def _publish(self, deltas: list[SeqDelta]) -> None:
        for delta in deltas:
            if delta.request_id in self._waits_for_first:
                self._waits_for_first.discard(delta.request_id)
                self._watchers.first(self, int(delta.request_id))
            if delta.finish_reason is not None:
                assert delta.timing is not None  # it is reported with the end
                self._watchers.ended(self, int(delta.request_id), delta.timing)

    def first_token_out(self, index: int) -> None:
        """The request's first token is out: until then a server counts its prompt as queued."""
        self._queued.pop(index, None)

    def answer_out(self) -> None:
        """The last step of an answer has ended, or the request was refused."""
        self._ended += 1

    def load_due_at(self) -> float:
        return self.pace.due_at(self._accepted, self._accepted - self._ended)

    @property
    def accepted(self) -> int:
        return self._accepted

    # ── the feed ─────────────────────────────────────────────────────────────────────────────────────────

    def load(self) -> Load:
        scheduler = self.engine.scheduler
        counters, pool = scheduler.counters, scheduler.pool
        return Load(
            seq=self._seq,
            state="draining" if self.state == "draining" else "ready",
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._inbox),
            queued_tokens=sum(self._queued.values()),
            kv_blocks_held=pool.num_held,
            kv_blocks_cached=pool.num_cached,
            steps=counters.steps,
            accepted=self._accepted,
            ended=self._ended,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            busy_s=counters.busy_s,
            prefill_tokens=counters.prefill_tokens,
        )

    def take_events(self) -> list[FeedLine]:
        """Prefix events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _watch_index(self) -> None:
        """Report the blocks that the engine's prefix index gains and loses, by the names of prompts."""
        index, names = self.engine.scheduler.index, self._names
        insert, forget = index.insert, index.forget

        def inserting(hash: bytes, block: int) -> bool:
            is_new = hash in names and block not in index
            added = insert(hash, block)
            if added and is_new:
                self._seq += 1
                self._events.append(Stored(self._seq, (names[hash],)))
            return added

        def forgetting(block: int) -> None:
            hash = index.hash_of(block)
            if hash is not None and hash in names:
                self._seq += 1
                self._events.append(Removed(self._seq, (names[hash],)))
            forget(block)

        # A server listens through the engine's messages; here the methods are replaced.
        setattr(index, "insert", inserting)  # noqa: B010
        setattr(index, "forget", forgetting)  # noqa: B010
