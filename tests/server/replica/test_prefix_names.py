"""The names that a feed reports are those whose KV blocks are cached, after any sequence of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.server.replica.prefix_names import PrefixNames, blocks_at, split_hashes

BLOCKS = [bytes([number]) * 16 for number in range(8)]
blocks = st.lists(st.sampled_from(BLOCKS), max_size=4, unique=True)
registered = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(BLOCKS)), max_size=4)
events = st.lists(
    st.one_of(
        st.tuples(st.just("register"), registered),
        st.tuples(st.just("change"), st.tuples(blocks, blocks, st.booleans())),
    ),
    max_size=20,
)


@given(events)
def test_a_reader_of_the_events_knows_what_a_snapshot_says(told: list[tuple[str, object]]) -> None:
    names, reader, cached = PrefixNames(), set[int](), set[bytes]()
    for kind, what in told:
        if kind == "register":
            pairs = list(what)  # type: ignore[call-overload]
            reader.update(names.register([name for name, _ in pairs], [block for _, block in pairs]))
        else:
            stored, removed, whole = what  # type: ignore[misc]
            removed = [block for block in removed if block not in stored]
            cached = set(stored) if whole else (cached - set(removed)) | set(stored)
            new, old = names.change(b"".join(stored), b"".join(removed), whole)
            assert reader.isdisjoint(new)
            assert reader.issuperset(old)
            reader = (reader - set(old)) | set(new)
        assert reader == set(names.stored())
        assert names._cached == cached
        assert set(names._pending) == set(names._names) - cached
    assert set(names.clear()) == reader
    assert names.stored() == []


def test_names_of_blocks_that_are_never_cached_are_bounded() -> None:
    names = PrefixNames(most_pending=3)
    names.register([0], [BLOCKS[0]])
    names.change(BLOCKS[0], b"", whole=False)
    for number in range(1, 8):
        names.register([number], [BLOCKS[number]])
    assert set(names._names) == {BLOCKS[0], *BLOCKS[5:]}
    assert names.stored() == [0]


def test_a_name_keeps_its_block_while_that_is_cached_and_then_takes_another() -> None:
    names = PrefixNames()
    names.register([7], [BLOCKS[0]])
    assert names.change(BLOCKS[0], b"", whole=False) == ([7], [])
    assert names.register([7], [BLOCKS[1]]) == []
    assert names.change(BLOCKS[1], BLOCKS[0], whole=False) == ([], [7])
    assert names.register([7], [BLOCKS[1]]) == [7]


def test_names_end_in_the_block_at_their_share_of_the_prompt() -> None:
    hashes = BLOCKS[:4]  # 70 tokens in blocks of 16
    assert blocks_at(hashes, 70, 16, [0.1, 0.3, 0.5, 0.7, 1.0]) == [hashes[i] for i in (0, 0, 1, 2, 3)]
    assert split_hashes(b"".join(hashes)) == hashes
