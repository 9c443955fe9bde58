"""The budget of a step after shortages of device memory: how far it falls, and when it grows again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.schedule.step_budget import FIRST_TRIAL_STEPS, LEAST_TOKENS, MAX_TRIAL_STEPS, StepBudget


def succeed(budget: StepBudget, steps: int) -> None:
    for _ in range(steps):
        budget.step_succeeded()


def test_the_budget_doubles_after_enough_steps_and_not_one_step_earlier() -> None:
    budget = StepBudget(2048)
    budget.reduce()
    budget.reduce()
    succeed(budget, FIRST_TRIAL_STEPS - 1)
    assert budget.tokens == 512
    budget.step_succeeded()
    assert budget.tokens == 1024
    succeed(budget, FIRST_TRIAL_STEPS)
    assert (budget.tokens, budget.is_reduced) == (2048, False)


def test_a_device_that_never_holds_the_full_budget_is_tried_ever_more_rarely() -> None:
    budget, trials = StepBudget(1024), []
    budget.reduce()
    for _ in range(9):
        steps = 0
        while budget.is_reduced:
            budget.step_succeeded()
            steps += 1
        trials.append(steps)
        budget.reduce()  # the first large step does not fit
    assert trials == [min(FIRST_TRIAL_STEPS << turn, MAX_TRIAL_STEPS) for turn in range(9)]


def test_past_shortages_are_forgotten_after_a_trial_at_the_full_budget() -> None:
    budget = StepBudget(1024)
    for _ in range(3):
        budget.reduce()
        budget.step_succeeded()
    assert budget.trial_steps > FIRST_TRIAL_STEPS
    while budget.is_reduced:
        budget.step_succeeded()
    succeed(budget, budget.trial_steps)
    assert budget.trial_steps == FIRST_TRIAL_STEPS


@given(full=st.integers(1, 10_000), shortages=st.lists(st.integers(0, 300), max_size=20))
def test_the_budget_stays_between_its_bounds(full: int, shortages: list[int]) -> None:
    budget = StepBudget(full)
    for steps in shortages:
        budget.reduce()
        succeed(budget, steps)
        assert min(full, LEAST_TOKENS) <= budget.tokens <= full
