"""The prefix index: equal hash means equal KV, and only then."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.kv.prefix_index import HASH_BYTES, PrefixIndex, block_hash


def names(index: PrefixIndex, tokens: list[int], **salt: str) -> list[bytes]:
    hashes: list[bytes] = []
    index.extend(hashes, tokens, **salt)
    return hashes


def test_only_full_blocks_have_a_name() -> None:
    index = PrefixIndex(4)
    assert [len(names(index, list(range(length)))) for length in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_names_extended_bit_by_bit_equal_names_made_at_once() -> None:
    index, tokens = PrefixIndex(4), list(range(19))
    grown: list[bytes] = []
    for length in range(len(tokens) + 1):
        index.extend(grown, tokens[:length])
    assert grown == names(index, tokens)
    assert {len(name) for name in grown} == {HASH_BYTES}


def test_the_same_tokens_after_another_beginning_have_another_name() -> None:
    index = PrefixIndex(2)
    assert names(index, [1, 2, 7, 8])[1] != names(index, [3, 4, 7, 8])[1]


def test_token_and_block_borders_are_part_of_the_name() -> None:
    assert block_hash(b"", [1, 256]) != block_hash(b"", [1 + (256 << 8), 0])
    assert names(PrefixIndex(2), [1, 2, 3, 4])[-1] != names(PrefixIndex(4), [1, 2, 3, 4])[-1]


def test_model_adapter_and_namespace_never_meet() -> None:
    tokens = [1, 2, 3, 4]
    first_names = {
        names(PrefixIndex(4, model), tokens, adapter=adapter, namespace=namespace)[0]
        for model in ("", "a", "ab")
        for adapter in ("", "a", "b")
        for namespace in ("", "b", "ab")
    }
    assert len(first_names) == 27


def test_a_namespace_that_is_no_valid_text_is_hashed_all_the_same() -> None:
    assert names(PrefixIndex(1), [1], namespace="\ud800") != names(PrefixIndex(1), [1])


def test_lookup_returns_the_longest_known_beginning() -> None:
    index = PrefixIndex(2)
    hashes = names(index, [1, 2, 3, 4, 5, 6, 7, 8])
    for place in (0, 1, 3):  # a gap: what lies behind it cannot be used
        index.insert(hashes[place], 10 + place)
    assert index.lookup(hashes) == [10, 11]
    assert index.lookup(hashes[1:]) == [11]
    assert index.lookup([]) == []


def test_the_first_block_of_equal_content_stays_the_known_one() -> None:
    index = PrefixIndex(4)
    assert index.insert(b"x", 1)
    assert not index.insert(b"x", 2)
    assert index.lookup([b"x"]) == [1]
    assert 2 not in index


def test_a_block_cannot_have_two_names() -> None:
    index = PrefixIndex(4)
    index.insert(b"x", 1)
    with pytest.raises(ValueError, match="block 1 already has hash 78 and cannot also have 79"):
        index.insert(b"y", 1)
    assert index.lookup([b"y"]) == []
    assert index.hash_of(1) == b"x"


def test_a_forgotten_block_can_be_named_anew() -> None:
    index = PrefixIndex(4)
    index.insert(b"x", 1)
    index.forget(1)
    index.forget(1)
    assert index.lookup([b"x"]) == []
    assert index.insert(b"y", 1)
    assert index.entries() == [(b"y", 1)]


token_lists = st.lists(st.integers(0, 3), max_size=12)


@settings(max_examples=300, deadline=None)
@given(token_lists, token_lists, st.integers(1, 4))
def test_names_agree_exactly_as_far_as_the_tokens_do(first: list[int], second: list[int], size: int) -> None:
    index = PrefixIndex(size)
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    pairs = list(zip(names(index, first), names(index, second), strict=False))
    assert [a == b for a, b in pairs] == [(place + 1) * size <= common for place in range(len(pairs))]
