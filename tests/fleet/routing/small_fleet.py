"""A few replicas and routers in simulated time: steps with chunked prefill, a prefix cache, Load lines.

A step takes step_s + running_s for each decoding request + token_s for each prompt token.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from random import Random

from ridgeline.fleet.routing.book import LoadBook, Ticket
from ridgeline.fleet.routing.choose import choose
from ridgeline.fleet.routing.policy import Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.replica.load_pace import LOAD_EVERY_S, LoadPace
from tests.clock import Clock
from tests.fleet.routing.fleets import entry, load, started, table

CHUNK = 512
BLOCK = 64


@dataclass(frozen=True)
class Machine:
    step_s: float
    running_s: float
    token_s: float
    max_running: int = 32
    cache_blocks: int = 100_000


GPU = Machine(0.008, 0.00003, 0.00004, 128)
CPU = Machine(0.015, 0.005, 0.0007, 16)


@dataclass(eq=False)
class Work:
    arrival: float
    blocks: list[int]
    tokens: int
    output: int
    session: str = ""
    to_compute: int = 0
    made: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0
    ticket: Ticket | None = None
    book: LoadBook | None = None  # of its router


@dataclass(eq=False)
class Replica:
    machine: Machine
    cache: dict[int, None] = field(default_factory=dict)
    waiting: list[Work] = field(default_factory=list)
    running: list[Work] = field(default_factory=list)
    stepping: bool = False
    seq: int = 0
    steps: int = 0
    accepted: int = 0
    ended: int = 0
    computed: int = 0
    made: int = 0
    busy_s: float = 0.0
    pace: LoadPace = field(default_factory=LoadPace)

    def accept(self, work: Work) -> None:
        work.to_compute = work.tokens
        self.accepted += 1
        self.waiting.append(work)

    def look_up(self, work: Work) -> None:
        """The cached part of a prompt is known when its first chunk is computed."""
        hit = 0
        while hit < len(work.blocks) and work.blocks[hit] in self.cache:
            self.cache[work.blocks[hit]] = self.cache.pop(work.blocks[hit])
            hit += 1
        work.to_compute = max(work.tokens - hit * BLOCK, 1)

    def plan(self) -> tuple[float, list[tuple[Work, int]]]:
        """Seconds of the next step, and the prompt tokens that it computes."""
        self.running += self.waiting[: self.machine.max_running - len(self.running)]
        self.waiting = [one for one in self.waiting if one not in self.running]
        left, chunks = CHUNK, []
        for work in self.running:
            if work.to_compute and left:
                if work.to_compute == work.tokens:
                    self.look_up(work)
                part = min(work.to_compute, left)
                chunks.append((work, part))
                left -= part
        decoding = sum(not work.to_compute for work in self.running)
        m = self.machine
        return m.step_s + m.running_s * decoding + m.token_s * (CHUNK - left), chunks

    def queued(self) -> int:
        """As a server counts: whole prompts, until their first token."""
        return sum(one.tokens for one in (*self.waiting, *self.running) if not one.made)


def run(
    machine: Machine,
    replicas: int,
    arrivals: list[Work],
    policy: Policy,
    seed: int = 1,
    routers: int = 1,
    concurrency: int = 0,
) -> list[Work]:
    """The requests, each with its times. Held requests are sent in the order of their arrival.

    routers: each gets a part of the requests at random, and sees the others' in the Load lines alone.
    concurrency: requests open at a time; the next arrives when one ends. 0: as `arrivals` says.
    """
    clock, rng, order = Clock(), Random(seed), count()
    books = [LoadBook(clock, routers) for _ in range(routers)]
    prefixes = PrefixMap()
    fleet = {f"m-{number}": Replica(machine) for number in range(replicas)}
    for book in books:
        book.set_table(table(*map(entry, range(replicas))))
    for name in fleet:
        for book in books:
            book.hear(name, started("e", machine.max_running, 10**6))
        prefixes.hear(name, started())
    held: list[Work] = []
    later = arrivals[concurrency:][::-1] if concurrency else []
    events: list[tuple[float, int, str, object]] = [
        (100 + one.arrival, next(order), "arrive", one) for one in arrivals[: concurrency or None]
    ]
    events.append((100.0, next(order), "load", None))
    heapq.heapify(events)
    left = len(arrivals)

    def send(work: Work) -> bool:
        book = work.book = work.book or (rng.choice(books) if routers > 1 else books[0])
        prompt = PromptView("m", work.blocks, work.tokens, session=work.session)
        choice = choose(book, prefixes, prompt, policy, rng, clock.now)
        if choice is None:
            return False
        work.ticket = book.charge(choice.replica_id, prompt, choice.matched_blocks)
        prefixes.routed(choice.replica_id, work.blocks, clock.now)
        replica = fleet[choice.replica_id]
        replica.accept(work)
        step(choice.replica_id)
        due_at = replica.pace.due_at(replica.accepted, replica.accepted - replica.ended)
        heapq.heappush(events, (max(due_at, clock.now), next(order), "early", choice.replica_id))
        return True

    def step(name: str) -> None:
        replica = fleet[name]
        if not replica.stepping and (replica.waiting or replica.running):
            seconds, chunks = replica.plan()
            replica.stepping = True
            heapq.heappush(events, (clock.now + seconds, next(order), "stepped", (name, chunks, seconds)))

    def stepped(name: str, chunks: list[tuple[Work, int]], seconds: float) -> int:
        replica, ends = fleet[name], 0
        replica.busy_s += seconds
        replica.stepping, replica.steps = False, replica.steps + 1
        decoding = [one for one in replica.running if not one.to_compute]
        for work, part in chunks:
            work.to_compute -= part
            replica.computed += part
            if not work.to_compute:
                decoding.append(work)
                new = [one for one in work.blocks if one not in replica.cache]
                replica.cache.update(dict.fromkeys(new))
                replica.seq += 1
                prefixes.stored(name, replica.seq, new)
        gone = list(replica.cache)[: max(len(replica.cache) - machine.cache_blocks, 0)]
        if gone:
            for block in gone:
                del replica.cache[block]
            replica.seq += 1
            prefixes.removed(name, replica.seq, gone)
        for work in decoding:
            assert work.ticket is not None
            assert work.book is not None
            if not work.made:
                work.first_at = clock.now - 100
                work.book.first_token(work.ticket)
            work.made += 1
            replica.made += 1
            if work.made >= work.output:
                work.ended_at = clock.now - 100
                replica.running.remove(work)
                replica.ended += 1
                ends += 1
                work.book.discharge(work.ticket)
        step(name)
        return ends

    def report(name: str) -> None:
        one = fleet[name]
        line = load(
            seq=one.seq,
            running=len(one.running),
            waiting=len(one.waiting),
            queued_tokens=one.queued(),
            steps=one.steps,
            accepted=one.accepted,
            ended=one.ended,
            prompt_tokens=one.computed,
            output_tokens=one.made,
            busy_s=one.busy_s,
            prefill_tokens=one.computed,
        )
        one.pace.told(one.accepted, clock.now)
        for book in books:
            book.hear(name, line)

    while left:
        clock.now, _, kind, what = heapq.heappop(events)
        if kind == "arrive":
            assert isinstance(what, Work)
            if not send(what):
                held.append(what)
        elif kind == "stepped":
            ends = stepped(*what)  # type: ignore[misc]
            left -= ends
            for _ in range(min(ends, len(later))):
                work = later.pop()
                work.arrival = clock.now - 100
                heapq.heappush(events, (clock.now, next(order), "arrive", work))
            while held and send(held[0]):
                held.pop(0)
        elif kind == "early":
            one = fleet[str(what)]
            if one.pace.due_at(one.accepted, one.accepted - one.ended) <= clock.now:
                report(str(what))
        else:
            for name in fleet:
                report(name)
            heapq.heappush(events, (clock.now + LOAD_EVERY_S, next(order), "load", None))
    return arrivals
