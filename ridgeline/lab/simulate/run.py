"""SimulatedRun: the result of a simulation in the form of a measured run: one RequestRecord per request."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.engine.schedule.step import StepWork
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.perfmodel.step_times import StepTimes
from ridgeline.telemetry.stats import EngineStats, StepRecord


@dataclass(frozen=True, slots=True)
class KvUse:
    """Share of the KV blocks that live sequences hold, over the time in which steps ran."""

    mean: float
    peak: float


@dataclass(slots=True)
class SimulatedRun:
    """records: in the order of the plan
    steps:   how many forward passes; steps taken by fast-forward count one by one
    busy_s:  how long the device computed, of duration_s
    stats:   the scheduler's final counters: preemptions, prefix hits, tokens
    caveats: limitations of the result
    step_records: each step as the engine would have recorded it; only on request
    """

    records: list[RequestRecord]
    steps: int
    busy_s: float
    duration_s: float
    kv_use: KvUse
    stats: EngineStats
    caveats: list[str] = field(default_factory=list)
    step_records: list[StepRecord] = field(default_factory=list)

    @property
    def preemptions(self) -> int:
        return self.stats.preemptions


class Extent:
    """The largest steps of a run, and the share of its time outside the fitted range."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        names = ("decode_batch", "decode_context", "tokens", "prefill_context_product")
        self._limits = {
            has_prompt: [terms.ranges.get(name, (0.0, float("inf")))[1] for name in names]
            for has_prompt, terms in ((False, times.decode), (True, times.mixed))
        }
        self._worst: dict[bool, StepWork] = {}
        self.outside_s = 0.0

    def add(self, work: StepWork, seconds: float) -> None:
        """A step, or the last of a run of `seconds` in total."""
        batch, context, tokens, product = self._limits[work.prefill_tokens > 0]
        if (
            work.decode_batch > batch
            or work.decode_context > context
            or work.prefill_context_product > product
            or (work.prefill_tokens and work.prefill_tokens + work.decode_batch > tokens)
        ):
            self.outside_s += seconds
            worst = self._worst.get(work.prefill_tokens > 0, work)
            self._worst[work.prefill_tokens > 0] = StepWork(*map(max, worst, work))

    def caveats(self, busy_s: float) -> list[str]:
        if not self.outside_s or not busy_s:
            return []
        share = self.outside_s / busy_s
        lines = [
            f"{share:.1%} of the computing time is extrapolated: steps larger than any that was measured"
        ]
        for work in self._worst.values():
            lines += self._times.out_of_range(work)
        return lines
