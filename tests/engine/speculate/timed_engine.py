"""An engine whose steps take the time that a formula says, and whose text another formula: for the rule that
chooses draft lengths. No clock of this machine is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import RowResult, Sampled, StepPlan, StepResult, StepRow
from ridgeline.engine.speculate.drafter import ALONG, Draft, Drafter
from ridgeline.engine.speculate.speculation import Speculation
from tests.engine.simulated_engine import limits

VOCAB = 1000
Text = Callable[[Sequence, int], int]  # the token of a sequence at a position
Cost = Callable[[int, int], float]  # seconds of a step, from its tokens and the KV tokens that it reads


class TimedRunner:
    name = "timed"

    def __init__(self, text: Text, cost: Cost, noise: float = 0.0) -> None:
        self.now = 0.0
        self._text = text
        self._cost = cost
        self._noise = noise
        self._rng = random.Random(3)

    def execute(self, plan: StepPlan) -> StepResult:
        context = sum(row.start + row.count for row in plan.rows)
        seconds = self._cost(plan.num_tokens, context)
        self.now += seconds * (1 + self._noise * self._rng.random())
        if self._noise and self._rng.random() < 0.02:
            self.now += 5 * seconds  # another program had the cores
        return StepResult([self._row(row) for row in plan.rows])

    def _row(self, row: StepRow) -> RowResult:
        if not row.samplers:
            return RowResult()
        first = row.start + row.count - len(row.drafts)
        samples = [Sampled(self._text(row.seq, first))]
        for place, draft in enumerate(row.drafts, start=1):
            if samples[-1].token != draft:
                break
            samples.append(Sampled(self._text(row.seq, first + place)))
        return RowResult(samples)


class TimedDrafter:
    """A drafter that computes. A pass takes `pass_s`, a token that it reads `token_s`.

    right: whether the guess of the token at a position is; each_pass: a guess; else all guesses take one
    """

    name = "timed"
    waits = True
    longest = 7

    def __init__(
        self,
        text: Text,
        pass_s: float,
        right: Callable[[int], bool] = lambda position: True,
        *,
        each_pass: bool = True,
        token_s: float = 0.0,
    ) -> None:
        self.runner: TimedRunner
        self.asked: list[tuple[float, int]] = []  # when, and for how many guesses
        self.asked_s = self.reading_s = 0.0
        self.reads: list[int] = []  # tokens, of each time it read
        self._text, self._right = text, right
        self._pass_s, self._token_s = pass_s, token_s
        self._each_pass = each_pass
        self._known: dict[Sequence, int] = {}

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        assert not any(map(self.behind, seqs))
        spent_s = self._pass_s * self.passes(min(most, self.longest))
        self.asked.append((self.runner.now, most))
        self.asked_s += spent_s
        self.runner.now += spent_s
        for seq in seqs:
            self._known[seq] = len(seq.tokens)
        return [self._draft(seq, min(most, self.longest)) for seq in seqs]

    def passes(self, length: int) -> int:
        return length if self._each_pass else 1

    def behind(self, seq: Sequence) -> int:
        missing = len(seq.tokens) - self._known.get(seq, 0) if self._token_s else 0
        return missing if missing > ALONG else 0

    def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
        room = tokens
        for seq in seqs:
            read = min(room, max(0, self.behind(seq) - 1))
            self._known[seq] = self._known.get(seq, 0) + read
            room -= read
        if room < tokens:
            self.reads.append(tokens - room)
            self.reading_s += self._token_s * (tokens - room)
            self.runner.now += self._token_s * (tokens - room)
        return tokens - room

    def observe(self, plan: StepPlan, reads: bool = False) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq, None)

    def _draft(self, seq: Sequence, most: int) -> Draft:
        places = range(len(seq.tokens), len(seq.tokens) + most)
        return Draft([self._text(seq, place) if self._right(place) else VOCAB - 1 for place in places])


def generate(
    text: Text,
    cost: Cost,
    drafter: Drafter | None,
    *,
    streams: int = 1,
    tokens: int = 600,
    prompt: int = 40,
    noise: float = 0.0,
    known_s: float | None = None,
    prompts: Iterator[int] | None = None,
    priorities: Iterator[int] | None = None,
) -> tuple[float, EngineCore]:
    """The seconds that all streams took, and the engine. known_s: of a pass, as measured at the start;
    prompts: their lengths"""
    runner = TimedRunner(text, cost, noise)
    if isinstance(drafter, TimedDrafter):
        drafter.runner = runner
    figures = limits(
        step_tokens=4096,
        prefill_chunk=4096,
        max_running=256,
        max_waiting=999,
        num_blocks=90_000,
        max_context=65_536,
    )
    speculation = None if drafter is None else Speculation(drafter, VOCAB, clock=lambda: runner.now)
    if known_s is not None:
        speculation.asking.times.note_draft(1, 0, 1, known_s)
    core = EngineCore(Scheduler(figures), runner, clock=lambda: runner.now, speculation=speculation)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    for number in range(streams):
        length = prompt if prompts is None else next(prompts)
        request = Request(f"r{number}", [(7 * number + i) % VOCAB for i in range(length)], params)
        core.add(request if priorities is None else replace(request, priority=next(priorities)))
    while core.has_work:
        core.step()
    return runner.now, core
