"""Markers, groups and the state of a resumable stream: every division of the bytes gives the same result."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.replica.resume import (
    BrokenMarkers,
    Failure,
    Finish,
    Group,
    GroupReader,
    Head,
    Marker,
    Output,
    ResumeState,
    Tokens,
    encode_group,
    split_state,
    with_state,
)

HEAD = Head("req-1", 1_700_000_000, 7, "v1", "e1")
finishes = st.none() | st.builds(Finish, st.sampled_from(["stop", "length"]), st.none() | st.integers(0, 9))
tokens = st.builds(Tokens, st.integers(0, 3), st.lists(st.integers(0, 2**31 - 1), max_size=4), finishes)
groups = st.lists(st.tuples(st.lists(tokens, max_size=3), st.binary(max_size=40)), max_size=8)


def written(parts: list[tuple[list[Tokens], bytes]]) -> bytes:
    marked = [
        Marker(len(events), t, head=None if place else HEAD, end=place == len(parts) - 1)
        for place, (t, events) in enumerate(parts)
    ]
    return b"".join(encode_group(marker, events) for marker, (_, events) in zip(marked, parts, strict=True))


def read(data: bytes, cuts: list[int]) -> tuple[list[Group], GroupReader]:
    reader, found = GroupReader(), []
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(places):
        found += reader.feed(data[start:end])
    return found, reader


@given(groups, st.lists(st.integers(0, 2000), max_size=12))
def test_any_division_of_the_bytes_gives_the_same_groups(
    parts: list[tuple[list[Tokens], bytes]], cuts: list[int]
) -> None:
    found, reader = read(written(parts), cuts)
    assert [(group.tokens, group.events) for group in found] == parts
    assert reader.incomplete_bytes == 0


@given(groups, st.integers(0, 2000))
def test_a_cut_stream_gives_its_complete_groups_and_no_part_of_the_next(
    parts: list[tuple[list[Tokens], bytes]], cut: int
) -> None:
    data = written(parts)
    found, _ = read(data[: cut % (len(data) + 1)], [])
    assert [group.events for group in found] == [events for _, events in parts[: len(found)]]
    later, _ = read(data, [cut])
    assert later[: len(found)] == found


@given(groups)
def test_the_state_accumulates_the_tokens_of_each_choice(parts: list[tuple[list[Tokens], bytes]]) -> None:
    state = ResumeState()
    for group in read(written(parts), [])[0]:
        state.add(group.marker)
    every = [entry for told, _ in parts for entry in told]
    for choice in {entry.choice for entry in every}:
        own = [entry for entry in every if entry.choice == choice]
        output = state.outputs[choice]
        assert output.tokens == [token for entry in own for token in entry.ids]
        assert [chunk for chunk in output.chunks() if chunk] == [entry.ids for entry in own if entry.ids]
        assert output.finish == next((e.finish for e in reversed(own) if e.finish is not None), None)
    assert state.ended == bool(parts)
    assert state.num_tokens == sum(len(entry.ids) for entry in every)


@given(groups)
def test_a_state_passes_through_a_request_body_unchanged(parts: list[tuple[list[Tokens], bytes]]) -> None:
    state = ResumeState()
    for group in read(written(parts), [])[0]:
        state.add(group.marker)
    body = b'{"model":"m","messages":[{"role":"user","content":"\\u00e9 1.50"}],"stream":true}'
    client, found = split_state(with_state(body, state))
    assert found == state
    assert msgspec.json.decode(client) == msgspec.json.decode(body)


def test_a_state_keeps_bursts_calls_and_cached_tokens() -> None:
    state = ResumeState()
    state.add(Marker(0, [Tokens(0, [1])], c=3, calls=[(0, "call_a")], cached={0: 16}, head=HEAD))
    state.add(Marker(0, [Tokens(0, [2, 3]), Tokens(0, [4], Finish("stop", "END"))], c=9))
    assert state.outputs[0] == Output([1, 2, 3, 4], [(1, 2)], Finish("stop", "END"), ["call_a"])
    assert state.outputs[0].chunks() == [[1], [2, 3], [4]]
    assert (state.characters, state.cached, state.head) == (9, {0: 16}, HEAD)
    assert state.may_continue


@pytest.mark.parametrize(
    ("marker", "continues"),
    [
        (Marker(0), True),
        (Marker(0, end=True), False),
        (Marker(0, failure=Failure(503, "engine_died", True)), True),
        (Marker(0, failure=Failure(504, "timeout", False)), False),
    ],
)
def test_a_stream_that_ended_or_was_refused_is_not_continued(marker: Marker, continues: bool) -> None:
    state = ResumeState()
    state.add(Marker(0, head=HEAD))
    state.add(marker)
    assert state.may_continue is continues


def test_without_a_head_nothing_can_be_continued() -> None:
    assert not ResumeState().may_continue


@pytest.mark.parametrize(
    "data",
    [b"data: {}\n\n", b":r not json\n", b':r {"n":-1}\n', b":x", b':r {"t":[]}\n', b":r " + bytes(1 << 20)],
)
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_stream_without_markers_is_refused(data: bytes, pieces: int) -> None:
    half = len(data) // pieces
    with pytest.raises(BrokenMarkers):
        read(data, [half])


def test_a_large_group_in_small_pieces_is_complete_with_its_last_byte() -> None:
    events = bytes(range(256)) * 512
    whole = encode_group(Marker(len(events), [Tokens(0, [1])]), events) + encode_group(Marker(0), b"")
    reader, found = GroupReader(), []
    for at in range(0, len(whole), 100):
        found += reader.feed(whole[at : at + 100])
    assert [one.events for one in found] == [events, b""]
    assert reader.incomplete_bytes == 0


@pytest.mark.parametrize("body", [b"{}", b"[]", b"nonsense", b'{"ridgeline_resume": 3}'])
def test_a_body_without_a_state_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        split_state(body)


def test_a_marker_must_announce_its_events() -> None:
    with pytest.raises(ValueError, match="announces 3 bytes"):
        encode_group(Marker(3), b"data")
