"""A scheduler driven by a model made of arithmetic, whose KV can be read back and checked.

Every written slot remembers the whole prefix it was computed from. Before a row's token is sampled, all its
slots are read again: a block that is shared wrongly, not copied, reused too early or found under the wrong
hash holds another prefix, and the run stops there.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from ridgeline.engine.grammar.masks import Mask, allows
from ridgeline.engine.schedule.forecast import OutputLengths
from ridgeline.engine.schedule.intake import sample_seed
from ridgeline.engine.schedule.request import FinishReason, Request, SamplingParams, SeqState, Sequence
from ridgeline.engine.schedule.scheduler import Scheduler, SchedulerLimits
from ridgeline.engine.schedule.step import (
    RowResult,
    Sampled,
    SeqDelta,
    StepPlan,
    StepResult,
    StepRow,
    TokenLogprob,
)
from ridgeline.engine.schedule.thinking import ThinkingCount

VOCAB = 13
EOS = 0
MASK = (1 << 64) - 1


def limits(**changes: object) -> SchedulerLimits:
    """Small round figures, so that a test can be followed with a pencil."""
    figures: dict[str, object] = {
        "step_tokens": 64,
        "prefill_chunk": 64,
        "max_running": 8,
        "max_waiting": 16,
        "block_size": 4,
        "num_blocks": 64,
        "max_context": 128,
        "eos_ids": (EOS,),
    }
    return SchedulerLimits(**(figures | changes))  # type: ignore[arg-type]


def request(name: str, prompt: list[int] | int, arrival: float = 0.0, **params: object) -> Request:
    """`prompt` as a number: that many tokens that no other name has. Ignores EOS unless told otherwise."""
    outer = {key: params.pop(key) for key in ("priority", "adapter", "cache_namespace") if key in params}
    if isinstance(prompt, int):
        prompt = [1 + zlib.crc32(f"{name}{i}".encode()) % (VOCAB - 1) for i in range(prompt)]
    sampling = SamplingParams(**({"ignore_eos": True, "seed": 7} | params))  # type: ignore[arg-type]
    return Request(name, prompt, sampling, arrival=arrival, **outer)  # type: ignore[arg-type]


def prefixes(req: Request, tokens: list[int]) -> list[int]:
    """For each token, one number that stands for it and all before it."""
    digest = zlib.crc32(f"{req.adapter}|{req.cache_namespace}".encode())
    digests = []
    for token in tokens:
        digest = ((digest ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK
        digests.append(digest)
    return digests


def next_token(digest: int, seed: int, mask: Mask | None = None) -> int:
    """mask: the tokens to choose from, if not all."""
    drawn = ((digest ^ (seed & MASK)) * 0xD1342543DE82EF95 & MASK) >> 35
    if mask is None:
        return drawn % VOCAB
    allowed = [token for token in range(VOCAB) if allows(mask, token)]
    return allowed[drawn % len(allowed)]


def answer_alone(req: Request, index: int, context: int) -> tuple[list[int], FinishReason]:
    """What a sample says when nothing else exists: no scheduler, no blocks, no batch."""
    params, tokens = req.params, list(req.prompt_ids)
    most = context if params.max_tokens is None else len(tokens) + params.max_tokens
    ends = frozenset(params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, EOS))
    matcher = None if req.compiled is None else req.compiled.matcher()
    thinking = None if params.thinking is None else ThinkingCount.of(params.thinking)
    while True:
        output, mask = tokens[len(req.prompt_ids) :], None
        if matcher is not None:
            mask = np.zeros(1, np.int32)
            matcher.fill(mask, ends if len(output) < params.min_tokens else frozenset(), params.ignore_eos)
        forced = None if thinking is None else thinking.forced
        if forced is not None and (matcher is None or matcher.permits(forced)):
            mask = np.array([1 << forced], np.int32)
        digest, seed = prefixes(req, tokens)[-1], sample_seed(params.seed or 0, index)
        tokens.append(next_token(digest, seed, mask))
        output = tokens[len(req.prompt_ids) :]
        complete = matcher is not None and matcher.advance(output[-1])
        if thinking is not None:
            thinking.advance(output[-1])
        if complete or (output[-1] in ends and len(output) > params.min_tokens):
            return output, FinishReason.STOP
        if len(tokens) >= min(most, context):
            return output, FinishReason.LENGTH


class SimulatedEngine:
    """Steps a scheduler and holds it to its promises at every step."""

    def __init__(
        self, limits: SchedulerLimits, output_lengths: OutputLengths | None = None, lookahead: int = 0
    ) -> None:
        self.limits = limits
        self.scheduler = Scheduler(
            limits, rng=random.Random(1), output_lengths=output_lengths, lookahead=lookahead
        )
        self.now = 0.0
        self.kv: dict[int, int] = {}
        self.in_flight: deque[tuple[StepPlan, list[list[int]]]] = deque()
        self.plans: list[StepPlan] = []
        self.output: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.final: dict[tuple[str, int], SeqDelta] = {}
        self.prompt_logprobs: dict[str, list[int]] = defaultdict(list)
        self.failing_samples: dict[tuple[str, int], int] = {}  # (request, sample) → output that fails
        self.failing_prompts: set[str] = set()  # requests whose last prompt token cannot be computed
        self.guess: Callable[[StepRow], list[int]] | None = None  # drafts for a row of a new plan

    # ── driving ──────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> StepPlan:
        """Launch one, and land what is due: with lookahead, the one before."""
        plan = self.launch()
        if self.in_flight and (not plan or len(self.in_flight) > self.scheduler.lookahead):
            self.land()
        return plan

    def launch(self) -> StepPlan:
        self.now += 1.0
        waited = {seq.order for seq in self.scheduler.waiting}
        plan = self.scheduler.schedule(self.now)
        self._check_plan(plan, waited)
        if self.guess is not None:
            for row in plan.rows:
                self.scheduler.add_drafts(row, self.guess(row), self.scheduler.room_for_drafts(plan))
            assert plan.num_tokens <= plan.budget
        self.plans.append(plan)
        if plan:
            # A device reads the block tables it was given, whatever the scheduler does afterwards.
            self.in_flight.append((plan, [list(row.seq.block_table) for row in plan.rows]))
        self._check_books()
        return plan

    def land(self) -> list[SeqDelta]:
        plan, tables = self.in_flight.popleft()
        result = self._execute(plan, tables)
        self.now += 0.25
        deltas = self.scheduler.apply(result, self.now)
        self._record(deltas)
        self._check_books()
        return deltas

    def abort(self, request_id: str, index: int | None = None) -> list[SeqDelta]:
        deltas = self.scheduler.abort(request_id, self.now, index)
        self._record(deltas)
        self._check_books()
        return deltas

    def drain(self, most_steps: int = 1000) -> int:
        """Step until nothing is left to do; a plan that does nothing while there is work is a failure."""
        while len(self.in_flight) > self.scheduler.lookahead:
            self.land()
        steps = 0
        while self.scheduler.has_work:
            in_flight = len(self.in_flight)
            plan = self.step()
            steps += 1
            assert plan or plan.preempted or in_flight, "there is work, and nothing was planned"
            assert steps <= most_steps, f"not done after {steps} steps"
        assert self.scheduler.pool.num_held == 0
        return steps

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────

    def _execute(self, plan: StepPlan, tables: list[list[int]]) -> StepResult:
        size = self.limits.block_size
        for copy in plan.copies:
            for offset in range(size):
                self.kv[copy.target * size + offset] = self.kv.get(copy.source * size + offset, -1)
        written: set[int] = set()
        all_digests = [
            prefixes(row.seq.request, row.seq.tokens[: row.start] + row.tokens)
            if row.drafts
            else prefixes(row.seq.request, row.seq.tokens)
            for row in plan.rows
        ]
        for row, digests in zip(plan.rows, all_digests, strict=True):
            if len(digests) < row.start + row.count:  # its input was never sampled: it ended in flight
                assert row.seq.state is SeqState.FINISHED
                digests += [-2] * (row.start + row.count - len(digests))
        for row, table, digests in zip(plan.rows, tables, all_digests, strict=True):
            for place in range(row.start, row.start + row.count):
                slot = table[place // size] * size + place % size
                assert slot not in written, f"two rows write slot {slot} in one step"
                written.add(slot)
                self.kv[slot] = digests[place]
        for row, table, digests in zip(plan.rows, tables, all_digests, strict=True):
            for place in range(row.start + row.count):
                slot = table[place // size] * size + place % size
                assert self.kv[slot] == digests[place], f"{row.seq.name} reads a foreign token at {place}"
        return StepResult([self._row_result(*pair) for pair in zip(plan.rows, all_digests, strict=True)])

    def _row_result(self, row: StepRow, digests: list[int]) -> RowResult:
        seq, end = row.seq, row.start + row.count
        first_token_due = not seq.num_output and end >= seq.prompt_len
        if first_token_due and seq.request.request_id in self.failing_prompts:
            return RowResult(error="the prompt could not be computed")
        prompt: list[TokenLogprob] = []
        if row.prompt_logprobs:
            places = range(row.start + 1, min(end + 1, seq.prompt_len))
            prompt = [TokenLogprob(seq.tokens[place], -1.0, 1) for place in places]
        if row.drafts:
            return RowResult(self._verify(row, digests))
        return RowResult([self._sample(sampler, digests[end - 1]) for sampler in row.samplers], prompt)

    def _verify(self, row: StepRow, digests: list[int]) -> list[Sampled]:
        ahead, samples = row.seq.ahead(), [self._sample(row.seq, digests[row.start])]
        for place, draft in enumerate(row.drafts, start=row.start + 1):
            if samples[-1].token != draft or ahead.ends_with(draft):
                break
            ahead.tokens.append(draft)
            samples.append(self._sample(ahead, digests[place]))
        return samples

    def _sample(self, seq: Sequence, digest: int) -> Sampled:
        if self.failing_samples.get((seq.request.request_id, seq.index)) == seq.num_output:
            return Sampled(-1, error="sampling failed")
        return Sampled(next_token(digest, seq.seed))

    # ── the promises ─────────────────────────────────────────────────────────────────────────────────────

    def _check_plan(self, plan: StepPlan, waited: set[tuple[int, float, int, int]]) -> None:
        assert plan.num_tokens <= plan.budget == self.limits.step_tokens
        assert len(self.scheduler.running) <= self.limits.max_running
        assert len({row.seq for row in plan.rows}) == len(plan.rows), "a sequence is in the plan twice"
        for row in plan.rows:
            assert 1 <= row.count <= self.limits.prefill_chunk
            seq, sampled = row.seq, bool(row.samplers)
            assert row.start == seq.num_computed + seq.in_flight - row.count
            assert sampled == (row.start + row.count == len(seq.tokens) + seq.pending - sampled)
            assert seq.steps_in_flight <= self.scheduler.lookahead + 1
        self._check_background(plan)
        sources = {copy.source for copy in plan.copies}
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        assert not sources & set(targets), "the order of copies would matter"
        for victim in plan.preempted:
            assert all(row.seq.order < victim.order for row in plan.rows), "an older one gave way to a newer"
        admitted = waited - {seq.order for seq in self.scheduler.waiting}
        if admitted and self.scheduler.waiting:
            assert max(admitted) < self.scheduler.waiting.first.order, "someone was overtaken in the queue"

    def _check_background(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        interactive = [row for row in plan.rows if not row.seq.background]
        if len(interactive) < len(plan.rows):
            prompts = [row for row in interactive if row.count > 1 or row.start < row.seq.prompt_len]
            assert not prompts, "a background row beside an interactive prompt"
            assert not scheduler.waiting.interactive, "a background row while an interactive request waits"
            if scheduler.running.interactive:
                assert plan.num_tokens <= self.limits.background_tokens_beside
        if any(not victim.background for victim in plan.preempted):
            assert not scheduler.running.background, "an interactive sequence gave way to a background one"

    def _check_books(self) -> None:
        self.scheduler.check_integrity()
        for _, tables in self.in_flight:
            for block in {block for table in tables for block in table}:
                assert self.scheduler.pool.references(block), f"block {block} was freed with a step in flight"

    def _record(self, deltas: list[SeqDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.final, f"{key} speaks after its end"
            self.output[key] += delta.tokens
            self.prompt_logprobs[delta.request_id] += [entry.token for entry in delta.prompt_logprobs]
            if delta.finish_reason is not None:
                assert delta.timing is not None
                assert delta.timing.output_tokens == len(self.output[key])
                self.final[key] = delta


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    """A plan as (sequence, start, count)."""
    return [(row.seq.name, row.start, row.count) for row in plan.rows]


def engine_with(
    *requests: object, expect: int | None = None, lookahead: int = 0, **changes: object
) -> SimulatedEngine:
    """`expect`: how long the forecast believes answers to be, right or wrong."""
    lengths = None if expect is None else OutputLengths(evidence=99, cold_tokens=expect)
    engine = SimulatedEngine(limits(**changes), lengths, lookahead)
    for req in requests:
        engine.scheduler.add(req)  # type: ignore[arg-type]
    return engine
