"""Measures this machine for `ridgeline doctor --calibrate`: its ceilings, then real steps of one model.

Steps are planned here and executed by the engine's own runner, sampling included, on KV blocks filled
beforehand. `step_costs` chooses step sizes from the times. Stays within its time budget.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import BackendUnavailable, EngineError, InvalidConfig
from ridgeline.engine.limits.calibration import (
    Calibration,
    Ceilings,
    Machine,
    ReadRate,
    load_calibration,
    shape_class,
    store_calibration,
    this_machine,
)
from ridgeline.engine.limits.step_costs import (
    BESIDE,
    MAX_DECODES,
    StepChoice,
    StepCost,
    StepCosts,
    choose_steps,
)
from ridgeline.engine.run.runner import Runner
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.request import Sequence as EngineSequence
from ridgeline.engine.schedule.step import BlockCopy, StepPlan, StepRow
from ridgeline.engine.start.memory import available_memory
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.ops.cpu import library
from ridgeline.ops.cpu.library import NativeError, NativeUnavailable, Peak

MIB = 1 << 20
READ_SIZES = tuple(size * MIB for size in (16, 32, 64, 96, 128, 256, 512))  # caches, then memory
PEAKS = {"float32": Peak.F32, "bfloat16": Peak.BF16, "int8": Peak.INT8}
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
DECODE_CONTEXT = 256  # context of each decode, in tokens
CHUNK_CONTEXT = 1024  # context of the middle of a chunk, in tokens
# The stages in order, and about how many seconds each takes.
STAGES = {
    "reading memory": 3.0,
    "multiplying": 1.2,
    "loading the model": 1.5,
    "prefill": 8.0,
    "prefill beside decodes": 6.0,
    "decode": 4.0,
}
LEAST_CHUNKS = 3  # fewer sizes do not allow a choice
MAX_ROUNDS = 7  # most runs of each step, plus one to warm up

Report = Callable[[str, float], None]  # current stage, and how much of it is done, 0 to 1
Clock = Callable[[], float]


@dataclass(frozen=True)
class Calibrated:
    """The result of calibrating one model, and the path of its file."""

    calibration: Calibration
    path: Path
    shape_class: str
    costs: StepCosts
    choice: StepChoice


class StepShape(NamedTuple):
    """A step to measure: decoding sequences, and one that prefills a chunk in the middle of its prompt."""

    decodes: int
    decode_context: int  # context of each of them, its own token included
    chunk: int
    chunk_start: int


class StepLimits(NamedTuple):
    """The bounds of a step: the weights it reads, its operations, and the rates of both."""

    step_bytes: float  # weights read by a step with samples
    kv_token_bytes: float  # keys and values of one token in all layers
    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, spec: ModelSpec, shape: StepShape) -> float:
        """The least time of a step: at best, reading and computing overlap."""
        kv_tokens = shape.decodes * spec.kv_tokens_seen(shape.decode_context) / spec.num_layers
        flops, weights = shape.decodes * spec.decode_flops(shape.decode_context), self.step_bytes
        if shape.chunk:
            end = shape.chunk_start + shape.chunk
            kv_tokens += spec.kv_tokens_seen(end) / spec.num_layers
            flops += shape.chunk * spec.matmul_flops_per_token
            flops += spec.attention_flops(shape.chunk, shape.chunk_start)
        if not shape.decodes:  # no samples, so the LM head is not read
            weights *= spec.matmul_flops_per_token / (spec.matmul_flops_per_token + spec.lm_head_flops)
        read = weights + kv_tokens * self.kv_token_bytes
        return max(read / self.read_bytes_per_s, flops / self.flops_per_s)


def calibrate_machine(threads: int | None, report: Report) -> Calibration:
    """Measure and store the ceilings; earlier choices for the same machine are kept."""
    try:
        machine = this_machine(threads)
    except NativeUnavailable as error:
        raise BackendUnavailable(f"calibration needs the native library: {error}") from error
    except NativeError as error:  # RIDGELINE_ISA names an instruction set this CPU lacks
        raise InvalidConfig(str(error)) from error
    known = load_calibration(machine)
    ceilings = measure_ceilings(machine, report)
    choices, costs = (known.choices, known.costs) if known else ({}, {})
    found = Calibration(machine, ceilings, choices, costs)
    _store(found)  # before the steps: they read their limits from it, and a full disk is reported early
    return found


def calibrate_model(model: str, path: Path, found: Calibration, report: Report) -> Calibrated:
    """Measure steps of the model at `path`, choose its step sizes and store them with the machine's."""
    from ridgeline.engine.start.build import build_engine

    report("loading the model", 0.0)
    config = EngineConfig(
        model=model,
        backend="native",
        threads=found.machine.threads,
        step_tokens=CHUNKS[-1] + MAX_DECODES,
        kv_tokens=BATCHES[-1] * DECODE_CONTEXT,
    )
    built = build_engine(config, path)
    read, decode = built.limits["read_bytes_per_s"], built.limits["decode_tokens_per_s"]
    kv_token_bytes = built.plan.kv_bytes / built.plan.kv_tokens
    limits = StepLimits(read / decode, kv_token_bytes, read, built.limits["flops_per_s"])
    steps = TrialSteps(
        built.core.runner, built.spec, built.plan.num_blocks, config.block_size, built.plan.max_context
    )
    costs = measure_costs(steps, limits, report)
    choice = choose_steps(costs)
    kind = shape_class(built.spec.parameters, built.plan.weights_bytes)
    calibration = Calibration(
        found.machine, found.ceilings, {**found.choices, kind: choice}, {**found.costs, kind: costs}
    )
    return Calibrated(calibration, _store(calibration), kind, costs, choice)


def _store(calibration: Calibration) -> Path:
    try:
        return store_calibration(calibration)
    except OSError as error:
        raise EngineError(
            f"cannot store the calibration: {error}. Set RIDGELINE_CACHE to another directory"
        ) from error


def measure_ceilings(machine: Machine, report: Report) -> Ceilings:
    sizes = [size for size in READ_SIZES if size <= available_memory() // 4]
    reads, peaks = [], {}
    for done, size in enumerate(sizes):
        report("reading memory", done / len(sizes))
        seconds = STAGES["reading memory"] / len(sizes)
        rate = _best_rate(partial(library.measure_read, size, machine.threads), seconds)
        reads.append(ReadRate(size, rate))
    for done, (name, peak) in enumerate(PEAKS.items()):
        report("multiplying", done / len(PEAKS))
        seconds = STAGES["multiplying"] / len(PEAKS)
        rate = _best_rate(partial(library.measure_peak, peak, machine.threads, machine.isa), seconds)
        if rate > 0:  # the instruction set has this unit
            peaks[name] = rate
    return Ceilings(tuple(reads), peaks)


def _best_rate(measure: Callable[[], float], seconds: float) -> float:
    """The highest of repeated measurements: other work on the machine only lowers it."""
    best, deadline = measure(), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        best = max(best, measure())
    return best


class TrialSteps:
    """Steps of any size on a runner reserved for measuring."""

    def __init__(
        self, runner: Runner, spec: ModelSpec, num_blocks: int, block_size: int, max_context: int
    ) -> None:
        self.spec = spec
        self._runner = runner
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._decode_context = min(DECODE_CONTEXT, max_context // 2)
        self._chunk_context = min(CHUNK_CONTEXT, max_context // 2 - 1)
        self._random = random.Random(0)
        self._fill()

    def shape(self, decodes: int, chunk: int) -> StepShape | None:
        """None if the context or the cache is too small for it.

        All chunks have the same average context; otherwise large ones would seem slow because of attention.
        """
        start = self._chunk_context - chunk // 2
        shape = StepShape(decodes, self._decode_context, chunk, start if chunk else 0)
        return shape if start >= 0 and self._blocks_of(shape) <= self._num_blocks else None

    def plan(self, shape: StepShape) -> StepPlan:
        plan, block = StepPlan(step_id=0, budget=shape.decodes + shape.chunk), 0
        for _ in range(shape.decodes):
            seq = self._sequence(shape.decode_context, block)
            block += len(seq.block_table)
            plan.rows.append(StepRow(seq, shape.decode_context - 1, 1, (seq,)))
        if shape.chunk:
            seq = self._sequence(shape.chunk_start + shape.chunk, block)
            plan.rows.append(StepRow(seq, shape.chunk_start, shape.chunk))
        return plan

    def run(self, plan: StepPlan) -> None:
        self._runner.execute(plan)

    def _fill(self) -> None:
        """Fill every block with a real block's content: untouched pages are not read from memory."""
        seq = self._sequence(self._block_size, 0)
        plan = StepPlan(step_id=0, budget=self._block_size, rows=[StepRow(seq, 0, self._block_size)])
        self.run(plan)
        plan.copies = [BlockCopy(0, block) for block in range(1, self._num_blocks)]
        self.run(plan)

    def _sequence(self, length: int, first_block: int) -> EngineSequence:
        tokens = [self._random.randrange(self.spec.vocab_size) for _ in range(length)]
        return EngineSequence(
            request=Request("calibration", tokens, SamplingParams(temperature=0.0, ignore_eos=True)),
            index=0,
            tokens=tokens,
            prompt_len=length,
            max_len=length + 1,
            seed=0,
            block_table=list(range(first_block, first_block + self._blocks(length))),
        )

    def _blocks_of(self, shape: StepShape) -> int:
        return shape.decodes * self._blocks(shape.decode_context) + self._blocks(
            shape.chunk_start + shape.chunk
        )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def measure_costs(steps: TrialSteps, limits: StepLimits, report: Report) -> StepCosts:
    """Measure the costs. Chunks that would take too long are left out."""

    def measure(what: str, sizes: Sequence[tuple[int, int]], needed: int) -> tuple[StepCost, ...]:
        shapes = [shape for size in sizes if (shape := steps.shape(*size)) is not None]
        works = [partial(steps.run, steps.plan(shape)) for shape in shapes]
        times = best_times(works, STAGES[what], partial(report, what), time.perf_counter)
        if len(times) < min(needed, len(works)):
            raise EngineError(
                f"too slow to calibrate: in {STAGES[what]:g} s only {len(times)} of {len(works)} sizes of "
                f"{what} steps could be measured, the largest in {times[-1]:.1f} s. Step sizes are not "
                "changed. Try again when the machine is idle"
            )
        return tuple(
            StepCost(shape.decodes, shape.chunk, took, limits.seconds(steps.spec, shape))
            for shape, took in zip(shapes, times, strict=False)  # the slowest may be missing
        )

    prefill = measure("prefill", [(0, chunk) for chunk in CHUNKS], LEAST_CHUNKS)
    beside = [(BESIDE, cost.chunk) for cost in prefill]
    return StepCosts(
        prefill=prefill,
        mixed=measure("prefill beside decodes", beside, LEAST_CHUNKS),
        decode=measure("decode", [(batch, 0) for batch in BATCHES], BATCHES.index(BESIDE) + 1),
    )


def best_times(
    works: Sequence[Callable[[], object]], budget_s: float, report: Callable[[float], None], clock: Clock
) -> list[float]:
    """The shortest time of each piece of work, smallest first; the last are skipped if they take too long.

    Each is run once, then again in rounds while there is time: a short disturbance then affects one run of
    each rather than all runs of one.
    """
    begun = clock()
    best: list[float] = []
    for work in works:
        # The next one takes at least as long as the last and needs two runs: the first has cold caches.
        if best and clock() - begun + 2 * best[-1] > budget_s:
            break
        work()
        best.append(_timed(work, clock))
        report(min((clock() - begun) / budget_s, 1.0))
    for _ in range(MAX_ROUNDS - 1):
        if clock() - begun + sum(best) > budget_s:
            break
        best = [min(known, _timed(work, clock)) for known, work in zip(best, works, strict=False)]
        report(min((clock() - begun) / budget_s, 1.0))
    report(1.0)
    return best


def _timed(work: Callable[[], object], clock: Clock) -> float:
    started = clock()
    work()
    return clock() - started
