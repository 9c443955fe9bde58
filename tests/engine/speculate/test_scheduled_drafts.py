"""Whatever is guessed, right, wrong or absurd: what was accepted ends and says what it would have said alone,
and at every step each block is where it must be. The model is arithmetic and reads back every slot."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.engine.schedule.forecast import OutputLengths
from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY
from ridgeline.engine.schedule.scheduler import SchedulerLimits
from ridgeline.engine.schedule.step import StepRow
from tests.engine.simulated_engine import VOCAB, SimulatedEngine, answer_alone, engine_with, request
from tests.engine.test_scheduler_properties import (
    Arrival,
    Ledger,
    arrivals,
    forecasts,
    lookaheads,
    scheduler_limits,
)


class Guesser:
    """Guesses what will be said, and is wrong as often as it is told to be."""

    def __init__(self, engine: SimulatedEngine, seed: int, wrong: float) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._wrong = wrong
        self.right = 0

    def __call__(self, row: StepRow) -> list[int]:
        seq, rng = row.seq, self._rng
        alone, _ = answer_alone(seq.request, seq.index, self._engine.limits.context)
        rest = alone[seq.num_output :] + [rng.randrange(VOCAB) for _ in range(3)]  # beyond its end too
        guesses = [rng.randrange(VOCAB) if rng.random() < self._wrong else token for token in rest]
        return guesses[: rng.randrange(7)]


def guessing(engine: SimulatedEngine, seed: int, wrong: float) -> SimulatedEngine:
    engine.guess = Guesser(engine, seed, wrong)
    return engine


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    scheduler_limits(),
    forecasts,
    lookaheads,
    st.lists(st.tuples(st.integers(0, 4), arrivals()), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), max_size=3),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.2, 1.0]),
)
def test_everything_accepted_says_what_it_would_say_alone(
    limits: SchedulerLimits,
    forecast: OutputLengths,
    lookahead: int,
    traffic: list[tuple[int, Arrival]],
    aborts: list[tuple[int, int]],
    seed: int,
    wrong: float,
) -> None:
    ledger = Ledger(guessing(SimulatedEngine(limits, forecast, lookahead), seed, wrong))
    step = 0
    for pause, arrival in traffic:
        for _ in range(pause):
            ledger.engine.step()
            step += 1
            for when, number in aborts:
                if when == step:
                    ledger.abort(number)
        ledger.submit(arrival)
    ledger.settle()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(scheduler_limits(), lookaheads, st.lists(arrivals(), min_size=2, max_size=5), st.integers(0, 1000))
def test_what_drafts_left_in_the_cache_is_what_was_said(
    limits: SchedulerLimits, lookahead: int, traffic: list[Arrival], seed: int
) -> None:
    """The second time prompts and answers lie under their hashes: a slot of a wrong guess would show."""
    engine = guessing(SimulatedEngine(limits, lookahead=lookahead), seed, 0.3)
    for _ in range(2):
        ledger = Ledger(engine)
        for arrival in traffic:
            ledger.submit(arrival)
        ledger.settle()
        for record in (engine.output, engine.final, engine.prompt_logprobs, engine.failing_samples):
            record.clear()
        engine.failing_prompts.clear()


def test_right_guesses_save_steps():
    plain = engine_with(request("a", 5, max_tokens=24))
    quick = guessing(engine_with(request("a", 5, max_tokens=24)), 0, 0.0)
    assert quick.drain() < 0.6 * plain.drain()
    assert quick.output == plain.output


def test_a_draft_never_takes_a_block_that_another_needs():
    """Two sequences fill the pool: drafts use what is free, and preempt no sequence."""
    engine = guessing(
        engine_with(request("a", 7, max_tokens=9), request("b", 7, max_tokens=9), num_blocks=8, expect=9),
        1,
        0.5,
    )
    engine.drain()
    assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(("later_s", "most"), [(1.0, 6), (1000.0, 64)])
def test_drafts_count_in_the_tokens_that_batch_work_may_add_to_a_step(later_s, most):
    """Background decodes alone: shortly after interactive traffic, at most `background_tokens` in a step."""
    engine = engine_with(
        request("a", 4, max_tokens=2),
        request("b", 4, max_tokens=30, priority=BACKGROUND_PRIORITY),
        background_tokens=6,
        background_quiet_s=100.0,
    )
    for _ in range(4):
        engine.step()
    plan = engine.scheduler.schedule(engine.now + later_s)
    assert [row.seq.request.request_id for row in plan.rows] == ["b"]
    assert engine.scheduler.room_for_drafts(plan) == most - 1


def test_a_withdrawn_step_gives_back_the_blocks_of_its_drafts():
    engine = engine_with(request("a", 4, max_tokens=20))
    engine.step()
    plan = engine.scheduler.schedule(1.0)
    taken = engine.scheduler.add_drafts(plan.rows[0], [1, 2, 3, 4, 5, 6], 60)
    assert (taken, len(plan.rows[0].seq.block_table)) == (6, 3)
    engine.scheduler.shed(1.0)
    assert len(plan.rows[0].seq.block_table) <= 2
    engine.scheduler.check_integrity()


def test_only_decodes_whose_tokens_are_known_take_drafts():
    engine = engine_with(request("a", 6, max_tokens=9), lookahead=1)
    scheduler = engine.scheduler
    prompt = engine.launch()
    assert scheduler.add_drafts(prompt.rows[0], [1, 2], 9) == 0
    ahead = engine.launch()  # its token is being sampled
    assert scheduler.add_drafts(ahead.rows[0], [1, 2], 9) == 0
    engine.drain()


def test_verified_rows_count_as_decodes_in_the_records():
    engine = engine_with(request("a", 4, max_tokens=20))
    engine.step()
    plan = engine.scheduler.schedule(1.0)
    engine.scheduler.add_drafts(plan.rows[0], [1, 2, 3], 60)
    assert plan.work == (0, 0, 0, 4, 4 * 8)
