"""The cascade: how sure an answer was, and what is asked for and taken away to know it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ridgeline.gateway.body import read_fields
from ridgeline.gateway.routing.cascade import (
    Cascade,
    ask_for_logprobs,
    confidence,
    strip_logprobs,
    tail_confidence,
)


def answer(*choices: list[float], **more: Any) -> bytes:
    made = [
        {
            "index": number,
            "message": {"role": "assistant", "content": "Nile"},
            "logprobs": {"content": [{"token": "x", "logprob": value} for value in logprobs]},
        }
        for number, logprobs in enumerate(choices)
    ]
    return json.dumps({"id": "a", "choices": made, "usage": {"total_tokens": 3}, **more}).encode()


def test_an_answer_is_as_sure_as_its_least_likely_tenth() -> None:
    sure, unsure = [math.log(0.99)] * 18, [math.log(0.2), math.log(0.05)]
    assert confidence(answer(sure + unsure)) == pytest.approx(0.1)  # sqrt(0.2 * 0.05)
    assert confidence(answer(sure)) == pytest.approx(0.99)


def test_of_several_choices_the_least_sure_counts() -> None:
    assert confidence(answer([math.log(0.9)], [math.log(0.4)])) == pytest.approx(0.4)


def test_an_answer_in_the_older_shape_is_read_too() -> None:
    body = json.dumps({"choices": [{"text": "Nile", "logprobs": {"token_logprobs": [None, -0.5]}}]})
    assert confidence(body.encode()) == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not JSON",
        b"[]",
        b'{"choices": null}',
        b'{"choices": [{"logprobs": null}]}',
        b'{"choices": [{"logprobs": {"content": []}}]}',
        b'{"choices": [{"logprobs": {"content": [{"logprob": "high"}]}}]}',
    ],
)
def test_an_answer_that_does_not_say_is_kept(body: bytes) -> None:
    assert confidence(body) is None
    assert Cascade(0.99).accept(body)


def test_an_answer_below_the_threshold_is_not_accepted() -> None:
    body = answer([math.log(0.6)])
    assert Cascade(0.59).accept(body)
    assert not Cascade(0.61).accept(body)


def test_an_impossible_token_is_no_error() -> None:
    assert tail_confidence([-math.inf]) == pytest.approx(0.0)
    assert tail_confidence([]) is None


def test_logprobs_are_asked_for_where_the_client_had_not() -> None:
    fields = read_fields(b'{"messages": []}')
    assert ask_for_logprobs("chat", fields)
    assert bytes(fields["logprobs"]) == b"true"
    older = read_fields(b'{"prompt": "a"}')
    assert ask_for_logprobs("completions", older)
    assert bytes(older["logprobs"]) == b"0"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", b'{"logprobs": true, "top_logprobs": 3}'),
        ("completions", b'{"logprobs": 0}'),
        ("messages", b"{}"),
        ("responses", b"{}"),
    ],
)
def test_nothing_is_changed_where_the_client_asked_or_the_dialect_has_none(kind: str, body: bytes) -> None:
    fields = read_fields(body)
    assert not ask_for_logprobs(kind, fields)
    assert fields == read_fields(body)


def test_what_the_client_never_asked_for_is_taken_away_and_nothing_else() -> None:
    before = json.loads(answer([-0.1], system_fingerprint="f"))
    after = json.loads(strip_logprobs(json.dumps(before).encode()))
    assert after["choices"][0]["logprobs"] is None
    before["choices"][0]["logprobs"] = None
    assert after == before
