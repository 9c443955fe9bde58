"""ToolInput: whatever a model writes, in whatever pieces it comes, what is passed on is a JSON object."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.web.tool_input import MAX_DEPTH, ToolInput

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=4)
nearly_json = st.text(alphabet='{}[]",:\\u0dDeE8c-+.1tfnrualse \n\x01é😀', max_size=40)


def passed_on(pieces: list[str], cut: bool = False) -> str:
    reader = ToolInput()
    return "".join([reader.add(piece) for piece in pieces] + [reader.end(cut)])


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    ends = [*places, len(text)]
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=100, deadline=None)
@given(objects, st.booleans(), st.data())
def test_an_object_is_passed_on_as_it_was_written(value: Any, ascii: bool, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=data.draw(st.sampled_from([None, 1])))
    assert json.loads(passed_on(pieces_of(text, data))) == value


@settings(max_examples=500, deadline=None)
@given(
    nearly_json | objects.map(json.dumps).flatmap(lambda text: nearly_json.map(lambda end: text[:-1] + end)),
    st.booleans(),
    st.data(),
)
def test_anything_becomes_an_object_the_same_for_every_split(
    text: str, cut: bool, data: st.DataObject
) -> None:
    whole = passed_on([text], cut)
    assert passed_on(pieces_of(text, data), cut) == whole
    assert passed_on(list(text), cut) == whole
    assert isinstance(json.loads(whole), dict)
    assert isinstance(jiter.from_json(whole.encode()), dict)


@settings(max_examples=100, deadline=None)
@given(objects, st.data())
def test_every_beginning_can_be_read_by_the_sdk(value: Any, data: st.DataObject) -> None:
    """The SDK parses what has come so far after every event."""
    reader, so_far = ToolInput(), ""
    for character in json.dumps(value):
        so_far += reader.add(character)
        if so_far:
            assert isinstance(jiter.from_json(so_far.encode(), partial_mode=True), dict)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" \n", {}),
        ("no", {"invalid_json": "no"}),
        ('"a"', {"invalid_json": '"a"'}),
        ('{"a": 1,}', {"a": 1, "invalid_json": ",}"}),
        ('{"a": 1} b', {"a": 1, "invalid_json": "b"}),
        ('{"a": [1}', {"a": [1], "invalid_json": "}"}),
        ('{"a": "b', {"a": "b", "invalid_json": ""}),
        ('{"a": 01}', {"invalid_json": '"a": 01}'}),
        ('{"a": NaN}', {"invalid_json": '"a": NaN}'}),
        ('{"a": "\\ud83d"}', {"a": "", "invalid_json": '\\ud83d"}'}),
        ('{"a": "\\ud83d\\u0041"}', {"a": "", "invalid_json": '\\ud83d\\u0041"}'}),
    ],
)
def test_what_is_not_json_is_kept_as_text(text: str, expected: Any) -> None:
    assert json.loads(passed_on([text])) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "b', {"a": "b"}),
        ('{"a": "b\\', {"a": "b"}),
        ('{"a": 12', {}),
        ('{"a": [1, 2', {"a": [1]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": {"b": ', {"a": {}}),
    ],
)
def test_what_was_cut_is_closed_without_a_word(text: str, expected: Any) -> None:
    assert json.loads(passed_on([text], cut=True)) == expected


def test_text_is_passed_on_as_it_comes_and_not_at_the_end() -> None:
    reader = ToolInput()
    assert reader.add('{"code": "pri') == '{"code": "pri'
    assert reader.add("nt(1)") == "nt(1)"
    assert reader.add('", "n": 1') == '"'
    assert reader.add("}") == ', "n": 1'
    assert reader.end(cut=False) == "}"


def test_depth_and_the_length_of_numbers_have_bounds() -> None:
    deep = passed_on(['{"a": ' + "[" * 100_000])
    assert "[" * (MAX_DEPTH - 1) + "]" in deep
    assert json.loads(deep)["invalid_json"].startswith("[")
    assert "invalid_json" in json.loads(passed_on(['{"a": ' + "1" * 5000 + "}"]))
