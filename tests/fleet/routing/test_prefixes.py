"""PrefixMap: events in order, gaps, epochs, guesses, bounds."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.replica.messages import Removed, Snapshot, Stored
from tests.fleet.routing.fleets import load, started

CHAIN = list(range(1000, 1020))


def test_a_match_ends_at_the_first_block_that_is_not_held() -> None:
    prefixes = PrefixMap()
    prefixes.stored("a", 1, CHAIN[:5])
    prefixes.stored("b", 1, CHAIN[:12])
    prefixes.removed("b", 2, CHAIN[8:9])
    prefixes.stored("c", 1, CHAIN[1:])
    assert prefixes.matches(CHAIN) == {"a": 5, "b": 8}
    assert prefixes.matches([]) == {}
    assert prefixes.matches([7]) == {}


def test_a_gap_needs_a_snapshot_and_later_events_wait_for_it() -> None:
    prefixes = PrefixMap()
    assert not prefixes.hear("a", started("e"))
    assert not prefixes.hear("a", Snapshot(10, tuple(CHAIN[:2])))
    assert not prefixes.hear("a", Stored(11, tuple(CHAIN[2:4])))
    assert prefixes.hear("a", Stored(13, tuple(CHAIN[6:8])))
    assert prefixes.position("a") == ("e", 11)
    assert prefixes.hear("a", Removed(14, tuple(CHAIN[:1])))
    assert prefixes.matches(CHAIN) == {"a": 4}
    assert prefixes.hear("a", load(seq=12))  # the load line shows a missed event too
    assert not prefixes.hear("a", Snapshot(14, tuple(CHAIN[:8])))
    assert not prefixes.hear("a", load(seq=14))
    assert prefixes.matches(CHAIN) == {"a": 8}


def test_events_that_come_twice_change_nothing() -> None:
    prefixes = PrefixMap()
    prefixes.stored("a", 1, CHAIN[:4])
    prefixes.removed("a", 2, CHAIN[2:4])
    assert not prefixes.stored("a", 1, CHAIN[:4])
    assert prefixes.matches(CHAIN) == {"a": 2}


def test_another_epoch_is_an_empty_cache_and_the_same_one_is_not() -> None:
    prefixes = PrefixMap()
    prefixes.hear("a", started("e1"))
    prefixes.stored("a", 1, CHAIN)
    prefixes.hear("a", started("e1"))
    assert prefixes.matches(CHAIN) == {"a": 20}
    prefixes.hear("a", started("e2"))
    assert prefixes.matches(CHAIN) == {}
    assert prefixes.position("a") == ("e2", 0)


def test_a_guess_counts_at_once_and_ends_unless_it_is_confirmed() -> None:
    prefixes = PrefixMap(guess_s=5.0)
    prefixes.routed("a", CHAIN, 100.0)
    prefixes.routed("b", CHAIN, 100.0)
    assert prefixes.matches(CHAIN, 104.9) == {"a": 20, "b": 20}
    prefixes.stored("a", 1, CHAIN[:6])
    assert prefixes.matches(CHAIN, 105.1) == {"a": 6}
    assert prefixes.matches(CHAIN, 1000.0) == {"a": 6}


def test_a_guess_of_blocks_that_are_held_ends_without_them() -> None:
    prefixes = PrefixMap()
    prefixes.stored("a", 1, CHAIN[:6])
    prefixes.routed("a", CHAIN, 0.0)
    assert prefixes.matches(CHAIN, 100.0) == {"a": 6}
    assert len(prefixes) == 6


def test_a_map_rebuilt_from_snapshots_is_the_map() -> None:
    rng, first, held = Random(4), PrefixMap(), {}
    for number in range(20):
        name = f"r{number}"
        held[name] = CHAIN[: rng.randrange(21)]
        first.stored(name, 1, held[name])
    again = PrefixMap()
    for name, blocks in held.items():
        again.snapshot(name, 1, blocks)
    assert again.matches(CHAIN) == first.matches(CHAIN)


def test_memory_is_bounded_and_shared_blocks_stay_longest() -> None:
    rng, prefixes = Random(1), PrefixMap(max_blocks=4096)
    shared = [rng.getrandbits(64) for _ in range(16)]
    for name in ("a", "b", "c"):
        prefixes.stored(name, 1, shared)
    for seq in range(2, 1000):
        prefixes.stored("a", seq, [rng.getrandbits(64) for _ in range(16)])
    assert 3000 < len(prefixes) <= 4096
    assert prefixes.matches(shared) == {"a": 16, "b": 16, "c": 16}


def test_slots_of_forgotten_replicas_are_used_again_without_their_blocks() -> None:
    prefixes = PrefixMap()
    prefixes.stored("keeper", 1, CHAIN)
    for number in range(3000):
        prefixes.stored(f"r{number}", 1, CHAIN[:10])
        prefixes.forget(f"r{number}")
    assert prefixes._slots < 10
    prefixes.snapshot("fresh", 5, [])
    assert prefixes.matches(CHAIN) == {"keeper": 20}


def test_many_different_depths_are_counted_low_and_never_high() -> None:
    prefixes, blocks = PrefixMap(), list(range(100))
    for depth in range(1, 101):
        prefixes.stored(f"r{depth}", 1, blocks[:depth])
    found = prefixes.matches(blocks)
    assert all(found[f"r{depth}"] == depth for depth in range(70, 101))
    assert all(found.get(f"r{depth}", 0) <= depth for depth in range(1, 101))


NAMES = ("a", "b", "c")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "snapshot", "restart", "forget", "gap"]),
        st.sampled_from(NAMES),
        st.lists(st.integers(0, 15), max_size=6),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(events=EVENTS, asked=st.lists(st.integers(0, 15), max_size=8))
def test_matches_are_those_of_plain_sets(events, asked) -> None:  # type: ignore[no-untyped-def]
    prefixes = PrefixMap()
    held: dict[str, set[int]] = {name: set() for name in NAMES}
    seq = dict.fromkeys(NAMES, 0)
    for number, (kind, name, blocks) in enumerate(events):
        if kind == "gap":
            assert prefixes.stored(name, seq[name] + 2, blocks)
            continue
        if kind in ("restart", "forget"):
            prefixes.started(name, f"e{number}") if kind == "restart" else prefixes.forget(name)
            held[name], seq[name] = set(), 0
            continue
        seq[name] += 1
        if kind == "stored":
            assert not prefixes.stored(name, seq[name], blocks)
            held[name] |= set(blocks)
        elif kind == "removed":
            assert not prefixes.removed(name, seq[name], blocks)
            held[name] -= set(blocks)
        else:
            seq[name] += 3
            prefixes.snapshot(name, seq[name], blocks)
            held[name] = set(blocks)
    expected = {}
    for name, known in held.items():
        depth = next((place for place, block in enumerate(asked) if block not in known), len(asked))
        if depth:
            expected[name] = depth
    assert prefixes.matches(asked) == expected


@settings(max_examples=100, deadline=None)
@given(depths=st.lists(st.integers(0, 200), min_size=1, max_size=20), length=st.integers(1, 200))
def test_long_prompts_are_matched_exactly_where_caches_lose_ends_first(
    depths: list[int], length: int
) -> None:
    prefixes, blocks = PrefixMap(), list(range(1, 201))
    for number, depth in enumerate(depths):
        if number % 2:
            prefixes.stored(f"r{number}", 1, blocks[:depth])
        else:
            prefixes.routed(f"r{number}", blocks[: depth // 2], 0.0)
            prefixes.routed(f"r{number}", blocks[:depth], 0.0)
    expected = {f"r{number}": min(depth, length) for number, depth in enumerate(depths) if depth}
    assert prefixes.matches(blocks[:length]) == expected
