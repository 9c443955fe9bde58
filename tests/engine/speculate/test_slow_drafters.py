"""A drafter that computes, on virtual time: whatever an ask costs, at most two percent are lost; one that
pays is found, and asked for as many guesses as pay; what it lacks of a sequence it reads in small parts."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY
from ridgeline.engine.speculate.asking import MOST_READING
from ridgeline.engine.speculate.drafting_times import READING_SHARE, READING_SIZES
from ridgeline.engine.speculate.loss_budget import MOST_SAVED, SHARE, LossBudget
from tests.engine.speculate.test_draft_lengths import cliff, compute_bound, random_text, small_model
from tests.engine.speculate.timed_engine import TimedDrafter, generate

COSTS = [small_model, compute_bound, cliff]
SLOW = (0.5, 3.0, 15.0)  # plain steps that one ask takes
TOKENS = 2000


def of_ten(right: int) -> Callable[[int], bool]:
    """Right at so many of ten positions, without a pattern."""
    return lambda position: zlib.crc32(f"right {position}".encode()) % 10 < right


def plain_s(cost: Callable[[int, int], float] = small_model) -> float:
    return cost(1, 40)


def gain(drafter: TimedDrafter, cost: Callable[[int, int], float] = small_model, **settings: Any) -> float:
    known_s = settings.pop("known_s", None)
    off, _ = generate(random_text, cost, None, **settings)
    on, core = generate(random_text, cost, drafter, known_s=known_s, **settings)
    assert core.speculation is not None, "the drafter failed"
    return off / on


def drafter(
    ask: float, right: int, cost: Callable[[int, int], float] = small_model, **how: Any
) -> TimedDrafter:
    return TimedDrafter(random_text, ask * plain_s(cost), of_ten(right), **how)


# ── what is lost ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ask", SLOW)
@pytest.mark.parametrize("right", [0, 4, 7, 10])
@pytest.mark.parametrize("each_pass", [True, False])
def test_no_slow_drafter_loses_two_percent(ask, right, each_pass):
    assert gain(drafter(ask, right, each_pass=each_pass), tokens=TOKENS) >= 0.98


@pytest.mark.parametrize("ask", SLOW)
@pytest.mark.parametrize("cost", COSTS)
def test_nor_at_another_cost_of_steps_or_with_several_streams(ask, cost):
    """Several streams answer fewer tokens each: an ask costs them all the same time."""
    for right in (0, 7):
        assert gain(drafter(ask, right, cost), cost, tokens=TOKENS) >= 0.98
        assert gain(drafter(ask, right, cost), cost, tokens=800, streams=6) >= 0.98


@pytest.mark.parametrize("ask", SLOW)
def test_the_first_ask_waits_until_one_percent_pays_for_it(ask):
    """Its cost was measured at the start; else it is taken for that of a plain step."""
    slow = drafter(ask, 0, each_pass=False)
    gain(slow, tokens=TOKENS, known_s=ask * plain_s())
    first_s = slow.asked[0][0]
    assert SHARE * first_s >= 0.9 * ask * plain_s()
    unknown = drafter(ask, 0, each_pass=False)
    assert gain(unknown, tokens=400) >= 1 / (1.02 + ask / 400)
    assert SHARE * unknown.asked[0][0] >= 0.9 * plain_s()


@pytest.mark.parametrize("ask", [0.1, *SLOW])
def test_looks_take_one_percent_of_the_time_of_plain_steps(ask):
    """And no more where the drafter is never right."""
    wrong = drafter(ask, 0)
    off, _ = generate(random_text, small_model, None, tokens=4000)
    generate(random_text, small_model, wrong, tokens=4000, known_s=ask * plain_s())
    assert 0 < wrong.asked_s <= 1.1 * SHARE * off


@pytest.mark.parametrize("ask", [0.1, *SLOW])
def test_a_drafter_that_becomes_worse_gives_back_little(ask):
    """Of what it saved: its chances are learned anew before much is lost."""
    at = 2000
    worse = TimedDrafter(random_text, ask * plain_s(), lambda position: position < at, each_pass=False)
    always = TimedDrafter(random_text, ask * plain_s(), each_pass=False)
    saved_s = generate(random_text, small_model, None, tokens=at)[0]
    saved_s -= generate(random_text, small_model, always, tokens=at)[0]
    off, _ = generate(random_text, small_model, None, tokens=2 * at)
    on, _ = generate(random_text, small_model, worse, tokens=2 * at)
    assert on <= off - saved_s + 0.02 * off + 40 * (1 + ask) * plain_s()


def test_the_budget_keeps_the_share_and_some_of_what_was_saved():
    budget = LossBudget()
    assert budget.affords(0.0)
    budget.limit(1.0)
    for _ in range(200):
        budget.pay_in(1.0)
    assert budget.left_s == pytest.approx(200 * SHARE)
    assert budget.affords_look(2.0 - 1e-9)
    assert not budget.affords_look(2.1)
    budget.looked()
    assert not budget.affords_look(0.1)
    assert budget.affords(0.1)
    budget.settle(1e6)
    assert budget.left_s == MOST_SAVED
    assert not budget.affords_look(0.1)  # savings are not spent on looks in a row
    budget.settle(-2e6)
    assert budget.left_s < 0


# ── what is gained ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ask", "right", "each_pass", "least"),
    [(0.1, 10, True, 2.0), (0.5, 10, False, 2.0), (3.0, 10, False, 1.1), (0.1, 7, True, 1.2)],
)
def test_one_that_pays_is_found_and_kept(ask, right, each_pass, least):
    """Three plain steps for seven right guesses pay too."""
    assert gain(drafter(ask, right, each_pass=each_pass), tokens=TOKENS) >= least


@pytest.mark.parametrize("ask", [0.1, 0.5])
def test_one_that_becomes_better_is_found_again(ask):
    """After 1,500 tokens at which it was always wrong."""
    better = TimedDrafter(random_text, ask * plain_s(), lambda position: position > 1500, each_pass=False)
    assert gain(better, tokens=4500) >= 1.3


def test_the_length_is_chosen_before_it_is_asked():
    """Where a pass is dear, few guesses pay. The drafter makes as many and no more."""
    dear, cheap = drafter(0.35, 8), drafter(0.01, 8)
    assert gain(dear, tokens=TOKENS) >= 1.02
    assert gain(cheap, tokens=TOKENS) >= 1.4
    few, many = (fmean(length for _, length in each.asked) for each in (dear, cheap))
    assert few < 0.6 * many
    assert many < 0.9 * cheap.longest


# ── what it lacks ───────────────────────────────────────────────────────────────────────────────────────────


def served(prompt: int, token: float, right: int = 10, **settings: Any) -> tuple[TimedDrafter, EngineCore]:
    """token: the time of reading one, of a plain step's"""
    reading = drafter(0.1, right, token_s=token * plain_s())
    return reading, generate(random_text, small_model, reading, prompt=prompt, **settings)[1]


def test_a_prompt_is_read_in_parts_of_less_than_a_plain_step():
    reading, core = served(8000, 0.002, tokens=TOKENS)
    assert sum(reading.reads) >= 8000 - 16
    for tokens in reading.reads:
        short = tokens * reading._token_s <= 1.5 * READING_SHARE * plain_s()
        assert tokens <= READING_SIZES[-1] or (tokens <= MOST_READING and short)
    stats = core.stats().speculation
    assert stats.off["catch_up"] > len(reading.reads) / 2  # it is not asked before it has read
    assert stats.accepted > 300
    assert stats.reading_s == pytest.approx(reading.reading_s)


def test_others_are_guessed_for_while_it_reads():
    reading = drafter(0.1, 10, token_s=0.002 * plain_s())
    asked: list[tuple[int, int]] = []
    propose = reading.propose

    def proposed(seqs, most):
        asked.append((len(reading.reads), len(seqs)))
        return propose(seqs, most)

    reading.propose = proposed
    lengths = iter((40, 9000))
    _, core = generate(random_text, small_model, reading, streams=2, prompts=lengths, tokens=TOKENS)
    alone = [reads for reads, seqs in asked if seqs == 1]
    assert len(set(alone)) > 5  # parts of the long prompt were read between asks for the short one
    assert any(seqs == 2 for _, seqs in asked)
    assert core.stats().speculation.accepted > 300


def test_interactive_sequences_do_not_wait_for_the_reading_of_background_ones():
    reading = drafter(0.1, 10, token_s=0.002 * plain_s())
    classes: list[set[bool]] = []
    catch_up = reading.catch_up

    def caught_up(seqs, tokens):
        classes.append({seq.background for seq in seqs})
        return catch_up(seqs, tokens)

    reading.catch_up = caught_up
    priorities = iter((0, BACKGROUND_PRIORITY))
    generate(random_text, small_model, reading, streams=2, tokens=900, prompt=300, priorities=priorities)
    assert {False} in classes
    assert {False, True} not in classes


@pytest.mark.parametrize("prompt", [200, 4000, 30_000])
@pytest.mark.parametrize("token", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("right", [0, 6])
def test_reading_does_not_lose_two_percent(prompt, token, right):
    settings = {"prompt": prompt, "tokens": 600}
    assert gain(drafter(0.1, right, token_s=token * plain_s()), **settings) >= 0.98


def test_reading_is_no_part_of_what_a_draft_costs():
    """After a pause each ask comes with reading; an ask itself stays as cheap as it is."""
    reading, core = served(200, 0.006, right=0, tokens=4000)
    assert len(reading.reads) > 4
    assert core.speculation.asking.times.pass_s(1, 3000) == pytest.approx(0.1 * plain_s(), rel=0.05)
