"""EngineStats and StepRecord: the engine's own figures, sent to the server with every step's output."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What guessing tokens costs and saves, since the engine started.

    steps:  that verified guesses; drafts: rows of them that had guesses
    *_by_position: guesses verified and found right, by their place in the draft
    *_gain: tokens per second of such steps as a multiple of plain ones, over the last of them: as expected
            before the step, and as measured after it
    off:    reason → decodes that had no guesses verified
    """

    drafter: str = ""
    steps: int = 0
    drafts: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    draft_s: float = 0.0  # finding and judging guesses
    reading_s: float = 0.0  # a drafter's own, of tokens that it was behind with
    verify_s: float = 0.0  # steps with guesses
    predicted_gain: float = 1.0
    measured_gain: float = 1.0
    off: dict[str, int] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        return sum(self.drafted_by_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Current gauges, and counters since the engine started."""

    running: int = 0
    waiting: int = 0  # without background requests
    kv_blocks_total: int = 0
    kv_blocks_held: int = 0  # referenced by a live sequence
    kv_blocks_cached: int = 0  # unreferenced, reusable by prefix
    block_size: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    prefix_evicted: int = 0  # prompt tokens that were cached once, and evicted
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # computed or found
    output_tokens: int = 0
    busy_s: float = 0.0  # in which a step was planned or in flight
    prefill_tokens: int = 0  # computed in chunks; counted together with `steps` and `busy_s`
    last_step_end: float = 0.0  # monotonic; 0 = no step yet
    step_tokens: int = 0  # the current step budget: less than configured after the device ran out of memory
    waiting_background: int = 0
    speculation: SpeculationStats | None = None  # None: off

    @property
    def kv_use(self) -> float:
        return self.kv_blocks_held / self.kv_blocks_total if self.kv_blocks_total else 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as the planner needs it: tokens computed, context, and time."""

    step_id: int
    start: float  # monotonic
    prefill_tokens: int
    prefill_rows: int
    prefill_context_product: int  # Σ chunk · context: the cost of prefill attention
    decode_batch: int
    decode_context: int  # Σ KV tokens read by decode rows
    wall_s: float  # the forward pass and sampling, from launch to result
    schedule_s: float
    busy_s: float = 0.0  # the part of wall_s after the end of the previous step: these add up
    launch_s: float = 0.0  # the part of wall_s until the device had the step; 0 without a device
