"""Filters: what is refused, and every store against the oracle on random filters."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ridgeline.retrieval.errors import BadInput
from ridgeline.retrieval.filters import COMPARISONS, ORDERED, parse_filter, reason
from ridgeline.retrieval.types import check_attributes

VALUES: list[Any] = ["a", "b", "1", "", "true", 0, 1, 1.5, -2, True, False]
KEYS = ["k", "key with 'quotes\"", "z"]


def random_filter(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    if depth < 3 and draw.random() < 0.4:
        parts = [random_filter(draw, depth + 1) for _ in range(draw.randint(1, 3))]
        return {"type": draw.choice(["and", "or"]), "filters": parts}
    kind = draw.choice(COMPARISONS)
    value: Any = draw.choice([v for v in VALUES if kind not in ORDERED or type(v) in (int, float)])
    if kind in ("in", "nin"):
        value = draw.sample(VALUES, draw.randint(0, 3))
    return {"type": kind, "key": draw.choice(KEYS), "value": value}


def random_attributes(draw: random.Random) -> dict[str, Any]:
    return {key: draw.choice(VALUES) for key in KEYS if draw.random() < 0.7}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "filters"),
        ({"type": "like", "key": "a", "value": 1}, "filters.type"),
        ({"type": "eq", "value": 1}, "filters.key"),
        ({"type": "gt", "key": "a", "value": "x"}, "filters.value"),
        ({"type": "in", "key": "a", "value": "x"}, "filters.value"),
        ({"type": "in", "key": "a", "value": [1, None]}, "filters.value[1]"),
        ({"type": "eq", "key": "a", "value": float("nan")}, "filters.value"),
        (
            {"type": "and", "filters": [{"type": "eq", "key": "a", "value": 1, "x": 2}]},
            "filters.filters[0].x",
        ),
        ({"type": "or", "filters": []}, "filters.filters"),
    ],
)
def test_a_wrong_filter_is_refused_by_the_name_of_its_part(value: object, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_filter(value)
    assert refused.value.field == field


def test_attributes_beyond_the_limits_are_refused_by_key() -> None:
    for attributes, field in (
        ({str(i): 1 for i in range(17)}, "attributes"),
        ({"a": None}, "attributes.a"),
        ({"a": float("inf")}, "attributes.a"),
        ({"a": "x" * 513}, "attributes.a"),
        ({"x" * 65: 1}, "attributes"),
    ):
        with pytest.raises(BadInput) as refused:
            check_attributes(attributes)
        assert refused.value.field == field


def test_types_never_mix_and_missing_attributes_match_negations_only() -> None:
    for kind, value, attributes, expected in (
        ("eq", 1, {"k": True}, False),
        ("eq", "1", {"k": 1.0}, False),
        ("eq", 1, {"k": 1.0}, True),
        ("ne", 1, {}, True),
        ("nin", [1], {}, True),
        ("eq", 1, {}, False),
        ("lt", 5, {"k": "3"}, False),
        ("lt", 5, {"k": True}, False),
        ("lt", 5, {"k": 3.0}, True),
    ):
        where = parse_filter({"type": kind, "key": "k", "value": value})
        assert where.matches(attributes) is expected
        assert reason(where, attributes).startswith("matches" if expected else "excluded")
