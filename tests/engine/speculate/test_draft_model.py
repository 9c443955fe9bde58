"""A draft model's guesses: right where it is the served model itself, without effect where it is not."""

from __future__ import annotations

from dataclasses import replace

import torch

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.run.drafters.model_drafter import ModelDrafter
from ridgeline.engine.schedule.intake import make_sequences
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import StepPlan, StepResult
from ridgeline.engine.speculate import speculation as speculation_module
from ridgeline.engine.speculate.speculation import Speculation
from tests.engine.speculate.option_cases import assert_alike, served, work
from tests.engine.speculate.small_heads import SIZES, SPEC, WEIGHTS
from tests.gpu.engines import Sizes, torch_runner, weights_of

BOUND = 2e-4
OTHER = weights_of(SPEC, torch.float32, seed=9)


def model_drafter(weights, blocks: int = 200, step_tokens: int = 24) -> ModelDrafter:
    sizes = replace(SIZES, num_blocks=blocks, step_tokens=step_tokens)
    return ModelDrafter(torch_runner(SPEC, weights, sizes), blocks, 16, step_tokens, SIZES.max_context)


def test_the_served_model_itself_is_always_right():
    """Also at temperature 0.8: it draws with the noise of the served model."""
    names = ["greedy", "sampled", "top-p", "penalties", "bias", "logprobs"]
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    expected = served(runner, SIZES, work(names))
    speculation = Speculation(model_drafter(WEIGHTS), SPEC.vocab_size, 3)
    assert_alike(served(runner, SIZES, work(names), speculation), expected, BOUND)
    stats = speculation.stats()
    assert stats.accepted > 0.9 * stats.drafted > 0


def test_another_model_changes_no_answer():
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    expected = served(runner, SIZES, work())
    speculation = Speculation(model_drafter(OTHER), SPEC.vocab_size, 4)
    assert_alike(served(runner, SIZES, work(), speculation), expected, BOUND)
    assert speculation.stats().accepted < speculation.stats().drafted


def test_nor_with_chunks_preemption_and_few_blocks():
    few = replace(SIZES, step_tokens=24, prefill_chunk=7, num_blocks=6, max_running=4)
    requests = work(["greedy", "sampled", "penalties", "grammar", "logprobs"], tokens=20)
    runner = torch_runner(SPEC, WEIGHTS, few)
    expected = served(runner, few, requests)
    drafter = model_drafter(WEIGHTS, blocks=5)
    speculation = Speculation(drafter, SPEC.vocab_size, 3)
    assert_alike(served(runner, few, requests, speculation), expected, BOUND)
    assert len(drafter._free) + sum(len(each.seq.block_table) for each in drafter._shadows.values()) == 5


ROOMY = Sizes(step_tokens=400, max_running=4, num_blocks=90, max_context=400)


class Counted:
    """Notes the rows of each step: its tokens, and whether it samples."""

    name = "torch"

    def __init__(self, runner) -> None:
        self._runner = runner
        self.steps: list[list[tuple[int, bool]]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps.append([(row.count, bool(row.samplers)) for row in plan.rows])
        return self._runner.execute(plan)


def counted() -> tuple[ModelDrafter, Counted]:
    runner = Counted(torch_runner(SPEC, WEIGHTS, ROOMY))
    return ModelDrafter(runner, 90, 16, ROOMY.step_tokens, ROOMY.max_context), runner


def test_a_long_prompt_is_read_in_parts_while_another_sequence_is_guessed_for(monkeypatch):
    monkeypatch.setattr(speculation_module, "MOST_READING", 40)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True)
    prompts = {"short": 5, "long": 290}
    requests = [Request(name, [(7 * n) % 90 + 3 for n in range(k)], params) for name, k in prompts.items()]
    runner = torch_runner(SPEC, WEIGHTS, ROOMY)
    expected = served(runner, ROOMY, requests)
    drafter, steps = counted()
    asked: list[list[str]] = []
    propose = drafter.propose

    def proposed(seqs: list[Sequence], most: int):
        asked.append([seq.request.request_id for seq in seqs])
        return propose(seqs, most)

    drafter.propose = proposed
    speculation = Speculation(drafter, SPEC.vocab_size, 2)
    assert_alike(served(runner, ROOMY, requests, speculation), expected, BOUND)
    assert max(sum(count for count, _ in step) for step in steps.steps) <= 40
    assert asked[:5] == [["short"]] * 5
    assert ["short", "long"] in asked
    assert speculation.stats().off["catch_up"] >= 5
    assert speculation.stats().accepted > 10


class Timed(Counted):
    """A step takes this time and a hundredth of it for each token, on a clock of its own."""

    def __init__(self, runner, clock: list[float], seconds: float) -> None:
        super().__init__(runner)
        self._clock, self._seconds = clock, seconds

    def execute(self, plan: StepPlan) -> StepResult:
        self._clock[0] += self._seconds * (1 + 0.01 * plan.num_tokens)
        return super().execute(plan)


def answered_in_turn(weights=None, share: float = 0.0) -> tuple[float, list[list[int]], int]:
    """Three requests one after the other: the time, their tokens and how many guesses were right.

    weights: of the draft model; share: the time of its steps, of a plain step's
    """
    params = SamplingParams(max_tokens=120, temperature=0.8, seed=3, ignore_eos=True)
    requests = [Request(f"r{n}", [(n + 7 * i) % 90 + 3 for i in range(60)], params) for n in range(3)]
    clock = [0.0]
    speculation = None
    if weights is not None:
        own = Timed(torch_runner(SPEC, weights, ROOMY), clock, share)
        drafter = ModelDrafter(own, 90, 16, ROOMY.step_tokens, ROOMY.max_context)
        speculation = Speculation(drafter, SPEC.vocab_size, clock=lambda: clock[0])
    runner = Timed(torch_runner(SPEC, WEIGHTS, ROOMY), clock, 1.0)
    core = EngineCore(Scheduler(ROOMY.limits()), runner, clock=lambda: clock[0], speculation=speculation)
    found: list[list[int]] = []
    for request in requests:
        found.append([])
        core.add(request)
        while core.has_work:
            for delta in core.step():
                found[-1] += delta.tokens
    assert core.speculation is speculation, "the drafter failed"
    return clock[0], found, 0 if speculation is None else speculation.stats().accepted


def test_the_policy_asks_it_where_it_pays_and_no_answer_changes():
    """The served model drafts for itself; another one does; itself at three times its time."""
    off_s, expected, _ = answered_in_turn()
    for weights, share, least in ((WEIGHTS, 0.05, 1.2), (OTHER, 0.05, 0.98), (WEIGHTS, 3.0, 0.98)):
        on_s, found, right = answered_in_turn(weights, share)
        assert found == expected
        assert off_s / on_s >= least
        assert right > 100 or least < 1


def test_a_draft_takes_as_many_passes_as_it_has_guesses():
    drafter, steps = counted()
    request = Request("r", [5, 6, 7, 8, 9], SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))
    (seq,) = make_sequences(request, ROOMY.limits(), 0, lambda: 1)
    seq.tokens.append(11)
    assert drafter.behind(seq) == 0
    for length in (1, 3, 9):
        steps.steps.clear()
        (draft,) = drafter.propose([seq], length)
        assert len(steps.steps) == len(draft.tokens) == drafter.passes(min(length, drafter.longest))
        seq.tokens += draft.tokens[:2]  # those were right, and what followed was not
        seq.tokens.append((draft.tokens[-1] + 1) % SPEC.vocab_size)
        steps.steps.clear()
    drafter.propose([seq], 1)
    assert steps.steps == [[(1, True)]]  # only what it had not computed


def test_a_text_that_grows_is_followed_without_reading_it_anew():
    drafter, _ = counted()
    request = Request("r", list(range(3, 90)) * 3, SamplingParams(max_tokens=99, ignore_eos=True))
    (seq,) = make_sequences(request, ROOMY.limits(), 0, lambda: 1)
    assert drafter.behind(seq) == 261
    assert drafter.catch_up([seq], 100) == 100
    assert drafter.behind(seq) == 161
    assert drafter.catch_up([seq], 400) == 160
    assert drafter.behind(seq) == 0  # `propose` computes the last one
    assert drafter.catch_up([seq], 400) == 0
    seq.tokens += [4] * 139
    assert drafter.behind(seq) is None  # its context has no room for a draft
