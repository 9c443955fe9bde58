"""The cost of a replica's work, fitted to the counters of its Load lines alone."""

from __future__ import annotations

import random

import msgspec
import pytest

from ridgeline.fleet.routing.step_cost import StepCost
from ridgeline.replica.messages import Load

STEP_S, RUNNING_S, TOKEN_S = 0.010, 0.002, 0.0007
FIRST = Load(0, "ready", 0, 0, 0, 0, 100, 0, 0, 0, 0, 0, 0, 0)


def after(before: Load, steps: int, output: int, prompt: int, slower: float = 1.0) -> Load:
    seconds = STEP_S * steps + RUNNING_S * output + TOKEN_S * prompt
    return msgspec.structs.replace(
        before,
        steps=before.steps + steps,
        output_tokens=before.output_tokens + output,
        busy_s=before.busy_s + seconds * slower,
        prefill_tokens=before.prefill_tokens + prompt,
    )


def hear(cost: StepCost, line: Load, lines: int) -> Load:
    dice = random.Random(4)
    for _ in range(lines):
        steps = dice.randint(1, 12)
        now = after(line, steps, dice.randint(0, 4 * steps), dice.choice([0, 0, 64, 256]))
        cost.hear(line, now)
        line = now
    return line


def test_the_three_costs_are_found() -> None:
    cost = StepCost()
    hear(cost, FIRST, 400)
    assert cost.learned
    found = (cost.step_s, cost.running_s, cost.token_s)
    assert found == pytest.approx((STEP_S, RUNNING_S, TOKEN_S), rel=0.1)


@pytest.mark.parametrize(
    ("steps", "output", "prompt", "slower"),
    [(6000, 20000, 90000, 1.0), (1, 4, 256, 100.0)],
    ids=["ten minutes without a line", "a step that stood still"],
)
def test_one_long_line_changes_little(steps: int, output: int, prompt: int, slower: float) -> None:
    cost = StepCost()
    line = hear(cost, FIRST, 400)
    before = cost.token_s
    now = after(line, steps, output, prompt, slower)
    cost.hear(line, now)
    hear(cost, now, 32)
    assert cost.token_s == pytest.approx(before, rel=0.1)
