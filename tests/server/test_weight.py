"""A body that would become too much is refused before it is decoded, by the name of its largest field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.server.errors import BadRequest
from ridgeline.server.http.weight import MAX_CONTAINERS, MAX_VALUES, check_weight

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "heavy",
    [
        {"metadata": [[]] * (MAX_CONTAINERS + 1)},
        {"metadata": [{}] * (MAX_CONTAINERS + 1)},
        {"metadata": [{"a": "[", "b": '"\\'}] * (MAX_CONTAINERS + 1)},
        {"metadata": [1] * (MAX_VALUES + 2)},
    ],
    ids=["lists", "objects", "objects with text", "numbers"],
)
def test_too_many_values_are_refused_by_the_name_of_their_field(heavy: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        check_weight(json.dumps({**HELLO, **heavy, "user": "me"}).encode())
    assert (refused.value.reply.param, refused.value.reply.code) == ("metadata", "too_many_values")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 300_000,
        "{," * 1_000_000,
        '{"a": [1, 2]}' * 100_000,
        "\\" * 400_000 + "[" * 200_000,
        '\\"[' * 200_000,
    ],
    ids=["brackets", "commas", "JSON", "backslashes", "escaped quotes"],
)
def test_text_weighs_nothing_whatever_it_says(text: str) -> None:
    check_weight(json.dumps({"prompt": text}).encode())


def test_what_is_no_json_is_refused_too() -> None:
    with pytest.raises(BadRequest) as refused:
        check_weight(b"[" * (2 * MAX_CONTAINERS + 1))
    assert refused.value.reply.param is None


def test_as_many_as_a_context_of_a_million_tokens_are_no_burden() -> None:
    check_weight(json.dumps({"prompt": [7] * 1_000_000}).encode())
