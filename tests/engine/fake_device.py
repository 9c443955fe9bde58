"""A device made of arithmetic that computes when it likes: at the launch, at the collection, or in between.

It keeps what a real one keeps: a KV cache by slots, and a row for each sequence with its newest token, from
which a step takes its input when the host does not know it yet. Tokens are made from what is read back from
the cache, so whatever is freed early, copied wrongly, lost or computed twice changes the answer. Masks of
grammars are taken over when a step is launched, or completed if one had to see the token before.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ridgeline.engine.errors import DeviceOutOfMemory
from ridgeline.engine.grammar.masks import Mask
from ridgeline.engine.run.sequence_mask import fill_mask, needs_mask
from ridgeline.engine.schedule.request import Request, SeqState, Sequence
from ridgeline.engine.schedule.step import RowResult, Sampled, StepPlan, StepResult, StepRow, TokenLogprob
from tests.engine.simulated_engine import next_token, prefixes

Failure = Callable[[StepPlan], BaseException | None]


class BrokenPromise(BaseException):
    """What the host asked for cannot be. Not an Exception: the engine would survive it, and the test pass."""


@contextmanager
def promises() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise BrokenPromise(f"{type(error).__name__}: {error}") from error


def never(_: StepPlan) -> None:
    return None


@dataclass
class LaunchedRow:
    """What a launch takes over from the host: nothing of a sequence is looked at later."""

    row: StepRow
    table: list[int]
    tokens: list[int]  # of the row, as far as the host knew them
    request: Request


@dataclass
class Ticket:
    """masks: of the sampling sequences, from their grammars when `complete`; empty without a grammar"""

    plan: StepPlan
    rows: list[LaunchedRow]
    masks: dict[Sequence, Mask] = field(default_factory=dict)
    complete: bool = False
    written: bool = False
    result: StepResult | None = None


@dataclass
class FakeDevice:
    block_size: int
    lookahead: int = 1
    most_samples = 1 << 20
    timing: random.Random | None = None  # None: computes as late as it may
    fail_launch: Failure = never
    fail_complete: Failure = never
    fail_collect: Failure = never
    fail_execute: Failure = never
    name: str = "fake"
    kv: dict[int, int] = field(default_factory=dict)  # slot → token
    newest: dict[Sequence, int | None] = field(default_factory=dict)  # the rows: each one's newest token
    queue: deque[Ticket] = field(default_factory=deque)  # launched, not computed
    in_flight: list[Ticket] = field(default_factory=list)  # launched, not collected
    log: list[str] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)  # all that were launched

    # ── the runner's contract ────────────────────────────────────────────────────────────────────────────

    def launch(self, plan: StepPlan) -> Ticket:
        ticket = self._ticket(plan)
        error = self.fail_launch(plan)
        if error is not None:
            if not isinstance(error, DeviceOutOfMemory):  # half of it is done, none of it is sampled
                self._compute_all()
                self._write(ticket.plan, ticket.rows[::2])
            raise error
        self.log.append(f"launch {plan.step_id}")
        self.plans.append(plan)
        with promises():
            assert all(before.complete for before in self.in_flight), (
                "launched behind one that was not completed"
            )
            if not any(map(_awaits_its_token, ticket.rows)):
                self._take_masks(ticket)
        self.queue.append(ticket)
        self.in_flight.append(ticket)
        self._perhaps_compute()
        return ticket

    def complete(self, ticket: Ticket) -> None:
        if ticket.complete:
            return
        with promises():
            assert [ticket] == self.in_flight, "completed with the step before it in flight"
        error = self.fail_complete(ticket.plan)
        if error is not None:
            self._compute_all()
            self.queue.clear()
            self.in_flight.clear()
            for launched in ticket.rows[::2]:  # half of it is sampled, and the result is lost
                for seq in launched.row.samplers:
                    self.newest[seq] = -1
            raise error
        self.log.append(f"complete {ticket.plan.step_id}")
        with promises():
            self._take_masks(ticket)
        self._perhaps_compute()

    def collect(self, ticket: Ticket) -> StepResult:
        with promises():
            assert ticket is self.in_flight.pop(0), "collected out of order"
            assert ticket.complete, "collected before it was completed"
        error = self.fail_collect(ticket.plan)
        if error is not None:
            raise error
        with promises():
            while ticket.result is None:
                self._compute(self.queue.popleft())
        self.log.append(f"collect {ticket.plan.step_id}")
        return ticket.result

    def execute(self, plan: StepPlan) -> StepResult:
        with promises():
            assert not self.in_flight, "executed with steps in flight"
        ticket = self._ticket(plan)
        error = self.fail_execute(plan)
        if error is not None:
            raise error
        with promises():
            self._compute_all()
            self._take_masks(ticket)
            self._compute(ticket)
            assert ticket.result is not None
            return ticket.result

    def refusal(self, params: object) -> None:
        """Everything can be served here."""

    def idle(self) -> bool:
        return False

    def _ticket(self, plan: StepPlan) -> Ticket:
        with promises():
            self._retire(plan)
            return Ticket(plan, [self._take_over(row) for row in plan.rows])

    # ── the device ───────────────────────────────────────────────────────────────────────────────────────

    def _retire(self, plan: StepPlan) -> None:
        for seq in plan.retired:
            users = [ticket for ticket in self.in_flight for row in ticket.plan.rows if row.seq is seq]
            assert not users, f"{seq.name} is retired with a step in flight"
            self.newest.pop(seq)  # each is named once, and had a row

    def _take_over(self, row: StepRow) -> LaunchedRow:
        seq = row.seq
        assert seq.state is SeqState.RUNNING, f"{seq.name} is computed as {seq.state}"
        known = seq.tokens[row.start : row.start + row.count]
        assert len(known) == row.count or (row.count == 1 and seq in self.newest)
        for sampler in (seq, *row.samplers):
            self.newest.setdefault(sampler, None)
        assert len(seq.block_table) * self.block_size >= row.start + row.count
        return LaunchedRow(row, list(seq.block_table), known, seq.request)

    def _take_masks(self, ticket: Ticket) -> None:
        ticket.complete = True
        for seq in (seq for launched in ticket.rows for seq in launched.row.samplers):
            if needs_mask(seq) and seq.state is not SeqState.FINISHED:
                ticket.masks[seq] = np.zeros(1, np.int32)
                fill_mask(seq, ticket.masks[seq])

    def _perhaps_compute(self) -> None:
        if self.timing is not None and self.timing.random() < 0.5:
            self._compute_all()

    def _compute_all(self) -> None:
        """As far as it can: of a step that was not completed, the forward pass."""
        while self.queue and self.queue[0].complete:
            self._compute(self.queue.popleft())
        if self.queue:
            self._forward(self.queue[0])

    def _compute(self, ticket: Ticket) -> None:
        self._forward(ticket)
        ticket.result = StepResult([self._sample(launched, ticket.masks) for launched in ticket.rows])

    def _forward(self, ticket: Ticket) -> None:
        if not ticket.written:
            ticket.written = True
            self._write(ticket.plan, ticket.rows)

    def _write(self, plan: StepPlan, rows: list[LaunchedRow]) -> None:
        size = self.block_size
        for copy in plan.copies:
            for offset in range(size):
                token = self.kv.get(copy.source * size + offset, -1)
                self.kv[copy.target * size + offset] = token
        written: set[int] = set()
        for launched in rows:
            newest = self.newest.get(launched.row.seq)
            tokens = launched.tokens or [-1 if newest is None else newest]
            for place, token in enumerate(tokens, start=launched.row.start):
                slot = self._slot(launched, place)
                assert slot not in written, f"two rows write slot {slot} in one step"
                written.add(slot)
                self.kv[slot] = token

    def _sample(self, launched: LaunchedRow, masks: dict[Sequence, Mask]) -> RowResult:
        row = launched.row
        read = [self.kv[self._slot(launched, place)] for place in range(row.start + row.count)]
        digest = prefixes(launched.request, read)[-1]
        samples = [Sampled(next_token(digest, seq.seed, masks.get(seq))) for seq in row.samplers]
        for seq, sampled in zip(row.samplers, samples, strict=True):
            if seq in self.newest:
                self.newest[seq] = sampled.token
        if not row.prompt_logprobs:
            return RowResult(samples)
        scored = launched.request.prompt_ids[row.start + 1 : row.start + row.count + 1]
        return RowResult(samples, [TokenLogprob(token, -1.0, 1) for token in scored])

    def _slot(self, launched: LaunchedRow, place: int) -> int:
        return launched.table[place // self.block_size] * self.block_size + place % self.block_size

    def check(self) -> None:
        """Every sequence with a step in flight still has all the blocks it was launched with."""
        for ticket in self.in_flight:
            for launched in ticket.rows:
                held = launched.row.seq.block_table[: len(launched.table)]
                assert held == launched.table, f"{launched.row.seq.name} lost blocks in flight"


def _awaits_its_token(launched: LaunchedRow) -> bool:
    return launched.row.seq.needs_last_token(launched.row.count - len(launched.tokens))
