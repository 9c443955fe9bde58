"""A run of decode steps taken at once leaves the scheduler as step after step would have left it."""

import random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ridgeline.engine.schedule.forecast import OutputLengths
from ridgeline.engine.schedule.request import SeqState, Sequence
from ridgeline.engine.schedule.scheduler import Scheduler, SchedulerLimits
from ridgeline.engine.schedule.step import RowResult, Sampled, StepPlan, StepResult
from ridgeline.lab.simulate.fast_forward import FastForwardScheduler
from tests.engine.simulated_engine import limits, request

TOKEN = 3


def result_of(plan: StepPlan) -> StepResult:
    return StepResult([RowResult([Sampled(TOKEN)] * len(row.samplers)) for row in plan.rows])


class Driver:
    """The engine's loop around a scheduler, with a clock that counts iterations."""

    def __init__(self, figures: SchedulerLimits, lookahead: int) -> None:
        # Expecting short answers admits too many sequences, so some are preempted.
        hopeful = OutputLengths(evidence=10**6, cold_tokens=1)
        self.scheduler = FastForwardScheduler(
            figures, rng=random.Random(1), output_lengths=hopeful, lookahead=lookahead
        )
        self.flights: list[StepPlan] = []
        self.iteration = 0

    def iterate(self) -> None:
        self.iteration += 1
        plan = self.scheduler.schedule(self.iteration)
        if plan:
            self.flights.append(plan)
        if self.flights and (not plan or len(self.flights) > self.scheduler.lookahead):
            self.scheduler.apply(result_of(self.flights.pop(0)), self.iteration + 0.5)

    def skip(self, most: int) -> int:
        run = self.scheduler.decode_run()
        if run is None:
            return 0
        iterations = min(run.iterations, most)
        planned = [self.iteration + 1 + ahead for ahead in range(iterations)]
        self.scheduler.take_run(run, planned[-1], [at + 0.5 for at in planned], lambda _: TOKEN)
        self.iteration += iterations
        return iterations


def state(scheduler: Scheduler) -> dict[str, Any]:
    """All that decides what it will do next."""
    pool = scheduler.pool
    return {
        "running": [sequence_state(seq) for seq in scheduler.running],
        "waiting": [sequence_state(seq) for seq in scheduler.waiting],
        "free": pool._free,
        "cached": list(pool._cached),
        "references": pool._references,
        "index": scheduler.index.entries(),
        "stats": scheduler.stats(),
        "flights": [
            (plan.step_id, [(row.seq.name, row.start, row.count) for row in plan.rows])
            for plan in scheduler._in_flight
        ],
        "seen": scheduler._interactive_seen,
    }


def sequence_state(seq: Sequence) -> tuple[Any, ...]:
    numbers = (seq.num_computed, seq.in_flight, seq.pending, seq.steps_in_flight, seq.furthest)
    return (seq.name, seq.state, seq.tokens, seq.block_table, seq.block_hashes, numbers, seq.timing)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 40),  # iteration at which it is added
        st.integers(1, 40),  # prompt tokens
        st.integers(1, 50),  # answer tokens
        st.sampled_from([None, None, 0, 1]),  # one of the prompts that are shared
    ),
    min_size=1,
    max_size=10,
)
figures = st.fixed_dictionaries(
    {
        "step_tokens": st.sampled_from([4, 16, 64]),
        "prefill_chunk": st.sampled_from([3, 16]),
        "max_running": st.sampled_from([2, 8]),
        "num_blocks": st.sampled_from([24, 30, 200]),  # the first two are too few: sequences are preempted
        "prefix_cache": st.booleans(),
    }
)


@settings(max_examples=120, deadline=None)
@given(arrivals=arrivals, figures=figures, lookahead=st.sampled_from([0, 1, 2]), most=st.integers(1, 30))
def test_a_run_taken_at_once_equals_as_many_steps(
    arrivals: list[tuple[int, int, int, int | None]], figures: dict[str, Any], lookahead: int, most: int
) -> None:
    skipping, stepping = (Driver(limits(**figures), lookahead) for _ in range(2))
    due = sorted(enumerate(arrivals), key=lambda item: item[1][0])
    while due or stepping.scheduler.has_work:
        while due and due[0][1][0] <= stepping.iteration:
            number, (_, prompt, answer, shared) = due.pop(0)
            tokens = [5 + shared] * prompt if shared is not None else prompt
            for driver in (skipping, stepping):
                driver.scheduler.add(request(str(number), tokens, driver.iteration, max_tokens=answer))
        until = due[0][1][0] - stepping.iteration if due else most
        iterations = skipping.skip(max(1, min(most, until)))
        if not iterations:
            skipping.iterate()
        for _ in range(iterations or 1):
            stepping.iterate()
        assert state(skipping.scheduler) == state(stepping.scheduler)
        skipping.scheduler.check_integrity()
    event(f"somebody gave way: {stepping.scheduler.stats().preemptions > 0}")


def test_a_run_ends_before_somebody_ends() -> None:
    driver = Driver(limits(), 0)
    driver.scheduler.add(request("long", 5, max_tokens=30))
    driver.scheduler.add(request("short", 5, max_tokens=12))
    driver.iterate()  # the prompts, and a token for each
    assert driver.skip(100) == 10
    short = [seq for seq in driver.scheduler.running if seq.request.request_id == "short"]
    assert [seq.num_output for seq in short] == [11]
    driver.iterate()
    assert short[0].state is SeqState.FINISHED


@pytest.mark.parametrize("params", [{"n": 2}, {"prompt_logprobs": 0}])
def test_steps_that_do_more_than_add_a_token_are_never_leapt_over(params: dict[str, Any]) -> None:
    driver = Driver(limits(), 0)
    driver.scheduler.add(request("special", 5, max_tokens=9, **params))
    assert driver.skip(9) == 0
    driver.iterate()
    assert driver.skip(9) == 0


def test_a_waiting_request_is_leapt_over_only_while_no_place_is_free() -> None:
    driver = Driver(limits(max_running=1), 0)
    driver.scheduler.add(request("first", 5, max_tokens=9))
    driver.iterate()
    driver.scheduler.add(request("second", 5, max_tokens=9))
    assert driver.skip(9) == 7
    driver.scheduler.abort("first", 9.0)
    assert driver.skip(9) == 0
