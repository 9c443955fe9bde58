"""A draft head that is not asked: it keeps a bounded number of bytes, a step costs it the same after any
number of steps, and it guesses again when it is asked. Answers stay the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.run.drafters import chain_drafter
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.speculation import Speculation
from tests.engine.speculate.matrix import drafter_of, model_of
from tests.engine.speculate.small_heads import SPEC, WEIGHTS, random_head
from tests.engine.speculate.test_eagle3 import Watched, chain
from tests.gpu.engines import Sizes, torch_runner

SIZES = Sizes(step_tokens=256, max_running=4, num_blocks=96, max_context=512)


class Pausing(Speculation):
    """Asks for three guesses a row in some steps, and in no others."""

    def __init__(self, drafter: Any, asks: Callable[[int], bool]) -> None:
        super().__init__(drafter, SPEC.vocab_size, 3)
        self.step = 0
        self._asks = asks
        observe = drafter.observe

        def observed(*args: Any) -> None:
            self.calls = calls_of(lambda: observe(*args))

        drafter.observe = observed

    def extend(self, plan: StepPlan, scheduler: Scheduler, most_samples: int | None = None) -> None:
        self.step += 1
        if self._asks(self.step):
            super().extend(plan, scheduler, most_samples)


def calls_of(work: Callable[[], None]) -> int:
    """Calls of functions, in Python and in C."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def held_bytes(drafter: Any) -> int:
    """Of all tensors that its state keeps alive, each storage once; without the model and the head."""
    storages: dict[int, int] = {}
    queue = [value for name, value in vars(drafter).items() if name not in ("head", "_embed", "_runner")]
    while queue:
        each = queue.pop()
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            queue += each.values()
        elif isinstance(each, (list, tuple)):
            queue += each
        elif type(each).__module__ == chain_drafter.__name__:
            names = getattr(type(each), "__slots__", None) or vars(each)
            queue += [getattr(each, name) for name in names]
    return sum(storages.values())


def requests(prompt: int, tokens: int) -> list[Request]:
    rng = random.Random(4)
    params = SamplingParams(max_tokens=tokens, temperature=0.8, seed=2, ignore_eos=True)
    return [
        Request(f"r{number}", [rng.randrange(3, 90) for _ in range(prompt + number)], params)
        for number in range(2)
    ]


def answers(
    core: EngineCore, work: list[Request], each: Callable[[], None] = lambda: None
) -> dict[str, list]:
    found: dict[str, list] = {request.request_id: [] for request in work}
    for request in work:
        core.add(request)
    while core.has_work:
        for delta in core.step():
            found[delta.request_id] += delta.tokens
        each()
    return found


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_paused_head_holds_a_bounded_number_of_bytes_and_does_bounded_work(kind):
    spec, weights = model_of(kind)
    work = requests(100, 300)
    expected = answers(EngineCore(Scheduler(SIZES.limits()), torch_runner(spec, weights, SIZES)), work)
    runner = torch_runner(spec, weights, SIZES)
    drafter = drafter_of(kind, runner, SIZES)
    speculation = Pausing(drafter, lambda step: step > 250)
    core = EngineCore(Scheduler(SIZES.limits()), runner, speculation=speculation)
    held: dict[int, int] = {}
    calls: dict[int, int] = {}

    def look() -> None:
        held[speculation.step], calls[speculation.step] = held_bytes(drafter), speculation.calls

    assert answers(core, work, look) == expected
    assert core.speculation is speculation, "the drafter failed"
    width = len(drafter.head.config.taps) * spec.hidden_size
    assert held[240] == held[80] == held[2]
    assert held[240] <= 2 * SIZES.max_running * 64 * width * 4
    assert calls[240] == calls[80]
    stats = speculation.stats()
    assert stats.drafted > 40  # it guessed again


def test_after_a_pause_it_guesses_what_the_head_guesses_behind_the_last_states():
    """Also where it is asked now and then, and where a pause is shorter than what is kept."""
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    watched = Watched(random_head(), WEIGHTS.embed.tensor, 1.0, runner, SIZES.max_running)
    watched.said = {}
    begun: dict[tuple[int, ...], int] = {}
    propose = watched.propose

    def proposed(seqs, most):
        drafts = propose(seqs, most)
        begun.update({tuple(seq.tokens): watched._states[seq].base for seq in seqs})
        return drafts

    watched.propose = proposed
    speculation = Pausing(watched, lambda step: 100 < step < 110 or 140 < step < 150 or step > 235)
    core = EngineCore(Scheduler(SIZES.limits()), runner, speculation=speculation)
    with torch.inference_mode(False):
        answers(core, requests(30, 250))
    assert core.speculation is speculation, "the drafter failed"
    begins = set(begun.values())
    assert len(begins) >= 3  # two long pauses: both sequences began anew behind each
    assert 0 not in begins
    checked = [
        chain(watched.head, list(tokens), begun[tokens])[: len(guesses)] == guesses
        for tokens, guesses in list(watched.said.items())[::5]
    ]
    assert len(checked) >= 8
    assert sum(checked) >= 0.9 * len(checked)  # hidden states differ by rounding


def test_a_long_prompt_is_read_at_once_while_the_head_is_in_use_and_else_not():
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    drafter = drafter_of("eagle3", runner, SIZES)
    speculation = Pausing(drafter, lambda step: True)
    core = EngineCore(Scheduler(replace(SIZES.limits(), prefix_cache=False)), runner, speculation=speculation)
    first, second = requests(110, 6)
    begins: list[int] = []

    def look() -> None:
        begins.extend(state.base for state in drafter._states.values())

    answers(core, [first], look)
    assert min(begins) > 0  # its prompt came before any guess
    begins.clear()
    answers(core, [second], look)
    assert min(begins) == 0
