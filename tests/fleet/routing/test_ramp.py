"""A fresh replica's allowance grows with what it has proven."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.fleet.routing.choose import choose
from ridgeline.fleet.routing.policy import Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.fleet.routing.ramp import FIRST, allowance, is_proven, queue_allowance
from tests.clock import Clock
from tests.fleet.routing.fleets import book_of, entry, load

PROMPT = PromptView("m", (), 640)
COUNTS = st.integers(0, 10**6)


@given(ended=COUNTS, prompt=COUNTS, hits=COUNTS, output=COUNTS, more=COUNTS)
def test_more_proof_never_allows_less(ended: int, prompt: int, hits: int, output: int, more: int) -> None:
    before = load(ended=ended, prompt_tokens=prompt, prefix_hits=hits, output_tokens=output)
    after = load(ended=ended + more, prompt_tokens=prompt, prefix_hits=hits, output_tokens=output + more)
    assert FIRST <= allowance(None) <= allowance(before) <= allowance(after)
    assert 1 <= queue_allowance(before) <= allowance(before)
    assert is_proven(after, 64) or not is_proven(before, 64)


def test_few_requests_wait_at_a_replica_that_proves_itself_within_a_second() -> None:
    assert [queue_allowance(load(ended=ended)) for ended in (0, 6, 14, 200)] == [1, 2, 4, 4]


def test_cached_tokens_and_time_prove_nothing() -> None:
    assert allowance(load(prompt_tokens=10**6, prefix_hits=10**6, steps=10**6)) == FIRST


def burst(state: str, ended: int = 0) -> int:
    """Requests at the fresh replica of three, after 60 that came at once and were heard of in between."""
    clock, rng, accepted = Clock(), Random(3), 0
    book = book_of(entry(0, state), entry(1), entry(2), clock=clock, max_running=32)  # type: ignore[arg-type]
    for name in ("m-1", "m-2"):
        book.hear(name, load(running=20, queued_tokens=8000, ended=9999))
    for _ in range(60):
        choice = choose(book, PrefixMap(), PROMPT, Policy(), rng, clock())
        if choice is not None:
            book.charge(choice.replica_id, PROMPT)
            accepted += choice.replica_id == "m-0"
        clock.now += 0.1
        book.hear("m-0", load(running=accepted, accepted=accepted, ended=ended))
        for name in ("m-1", "m-2"):
            book.hear(name, load(running=20, queued_tokens=8000, ended=9999))
    return accepted


def test_a_fresh_replica_is_not_stampeded_while_its_peers_are_busy() -> None:
    assert burst("ramping") == FIRST
    assert burst("ramping", ended=5) == FIRST + 5
    assert burst("ready") > 20
    assert burst("ramping", ended=30) > 20  # proven


def test_at_most_a_part_of_the_allowance_waits_for_its_first_step() -> None:
    book = book_of(entry(0, "ramping"), entry(1), max_running=32)
    book.hear("m-1", load(running=32, queued_tokens=9000))
    book.hear("m-0", load(ended=6))  # 8 at once, 2 of them waiting
    for _ in range(2):
        choice = choose(book, PrefixMap(), PROMPT, Policy(), Random(1), book.clock())
        assert choice is not None
        assert choice.replica_id == "m-0"
        book.charge("m-0", PROMPT)
    choice = choose(book, PrefixMap(), PROMPT, Policy(), Random(1), book.clock())
    assert choice is not None
    assert choice.replica_id == "m-1"


def test_without_proven_peers_a_ramp_holds_nothing_back() -> None:
    book = book_of(entry(0, "ramping"), entry(1, "starting"), max_running=8)
    sent = 0
    while choose(book, PrefixMap(), PROMPT, Policy(), Random(1), book.clock()) is not None:
        book.charge("m-0", PROMPT)
        sent += 1
    assert sent == 9  # max_running, and one that waits
