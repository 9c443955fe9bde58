"""PhaseLoad: keeps an engine in one phase, prefill or decode, for a number of steps.

Used by `run`. Prompts are random and distinct tokens, so the prefix cache finds nothing. Lengths are forced:
nothing ends early. Measures nothing itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.profile.work import Steps

if TYPE_CHECKING:
    from ridgeline.engine.run.core import EngineCore
    from ridgeline.engine.schedule.step import SeqDelta

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
DECODE_SPAN = 256  # tokens decoded before the sequences restart: keeps contexts near the requested length
MOST_SETTLING_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a phase."""

    sequences: int  # that decode together
    context: int  # cached tokens of each when it starts to decode
    prompt: int  # tokens of a prompt in the prefill phase


class PhaseLoad:
    def __init__(self, core: EngineCore, vocab: int, phase: Phase, shape: Shape, seed: int = 0) -> None:
        refuse_too_large(core, phase, shape)
        self.phase = phase
        self._span = decode_span(core, shape)
        self._core = core
        self._vocab = vocab
        self._shape = shape
        self._rng = random.Random(f"{seed} {phase}")
        self._count = 0
        self._open: set[str] = set()
        self._prompts: list[list[int]] = []
        self._decoded = 0

    def steps(self, count: int) -> Steps:
        """Run this many steps of this phase, and nothing else in between."""
        if self._decoded + count > self._span:
            self.close()
        return self._run(lambda done: done >= count)

    def steps_until(self, is_enough: Callable[[], bool]) -> Steps:
        """Run steps of this phase until `is_enough`, called after each, returns true."""
        return self._run(lambda done: done > 0 and is_enough())

    def close(self) -> None:
        """Leave the engine empty."""
        for name in self._open:
            self._core.abort(name)
        self._open.clear()
        self._core.drain()
        self._core.check_integrity()

    def _run(self, is_enough: Callable[[int], bool]) -> Steps:
        done = samples = sampling_steps = 0
        self._settle()
        self._take(self._core.drain())  # steps in flight were launched before the measurement
        before = self._last_step_id()
        while not is_enough(done):
            self._refill()
            sampled = self._step()
            samples += sampled
            sampling_steps += sampled > 0
            done += 1
        late = self._take(self._core.drain())  # a step in flight belongs to the measurement
        records = tuple(record for record in self._core.steps.dump() if record.step_id > before)
        if self.phase == "decode":
            records = tuple(record for record in records if record.prefill_tokens == 0)
        return Steps(records, samples + late, sampling_steps + (late > 0))

    def _settle(self) -> None:
        """Decode: all prompts are computed, and each sequence has its first token."""
        if self.phase == "prefill":
            return
        if self._open and self._decoded < self._span:
            return
        self.close()
        if not self._prompts:
            self._prompts = [self._prompt(self._shape.context) for _ in range(self._shape.sequences)]
        waiting = {self._add(prompt, self._span + 2) for prompt in self._prompts}
        for _ in range(MOST_SETTLING_STEPS):
            if not waiting:
                break
            for delta in self._core.step():
                _refuse_error(delta.error)
                waiting.discard(delta.request_id)
        self._decoded = 0

    def _refill(self) -> None:
        if self.phase == "prefill":
            while len(self._open) < self._shape.sequences:
                self._add(self._prompt(self._shape.prompt), 1)
        elif self._decoded >= self._span:
            self._settle()

    def _step(self) -> int:
        self._decoded += 1
        return self._take(self._core.step())

    def _take(self, deltas: list[SeqDelta]) -> int:
        for delta in deltas:
            _refuse_error(delta.error)
            if delta.finish_reason is not None:
                self._open.discard(delta.request_id)
        return sum(len(delta.tokens) for delta in deltas)

    def _add(self, prompt: list[int], output_tokens: int) -> str:
        name = f"{self.phase}-{self._count}"
        self._count += 1
        self._open.add(name)
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        self._core.add(Request(name, prompt, params))
        return name

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(tokens)]

    def _last_step_id(self) -> int:
        records = self._core.steps.dump()
        return records[-1].step_id if records else -1


def decode_span(core: EngineCore, shape: Shape) -> int:
    """How many tokens sequences of this context may decode."""
    return min(DECODE_SPAN, core.scheduler.limits.max_context - shape.context - 2)


def refuse_too_large(core: EngineCore, phase: Phase, shape: Shape, steps: int = 1) -> None:
    """BadInput if the engine cannot hold this many sequences of this length."""
    limits = core.scheduler.limits
    span = max(steps, decode_span(core, shape))
    longest = shape.prompt + 1 if phase == "prefill" else shape.context + span + 2
    if longest > limits.max_context:
        flag = "--prompt-tokens" if phase == "prefill" else "--context"
        raise BadInput(
            f"{flag}: {phase} needs sequences of {longest} tokens, and the engine's longest is "
            f"{limits.max_context}; ask for less"
        )
    if phase == "prefill":
        return
    if shape.sequences > limits.max_running:
        raise BadInput(
            f"--sequences {shape.sequences} is more than run together here ({limits.max_running}): "
            "raise --max-running or ask for fewer"
        )
    room = limits.num_blocks * limits.block_size
    if shape.sequences * (longest + limits.block_size) > room:
        raise BadInput(
            f"{shape.sequences} sequences of {longest} tokens do not fit in a KV cache of {room}: "
            "raise --kv-tokens, or lower --sequences or --context"
        )


def _refuse_error(error: str | None) -> None:
    if error is not None:
        raise LabError(f"the engine failed in a profiled step: {error}")
