"""Which requests share an answer: never two tenants', never two different ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.gateway.body import READ_HERE, read_fields
from ridgeline.gateway.caching.config import CacheConfig
from ridgeline.gateway.caching.partition import partition, wanted
from ridgeline.gateway.errors import BadRequest

names = st.text(min_size=0, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
# "N" for "n" is refused before anything is cached.
fields_read = names.filter(lambda name: name == name.casefold() or name.casefold() not in READ_HERE)
bodies = st.dictionaries(fields_read, values, max_size=5)
requests = st.tuples(names, names, st.sampled_from(["chat", "messages"]), bodies, st.lists(names, max_size=2))


def place(request: tuple[str, str, str, dict[str, Any], list[str]]) -> bytes:
    tenant, model, kind, body, variants = request
    return partition(tenant, model, kind, read_fields(json.dumps(body).encode()), variants)


@given(requests, requests)
def test_two_requests_share_a_partition_only_if_everything_is_the_same(first: Any, second: Any) -> None:
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    exactly = [json.dumps(one[:3]) + json.dumps(one[4]) for one in (first, second)]
    assert (place(first) == place(second)) <= (same and exactly[0] == exactly[1])


@given(bodies, names, names, st.randoms())
def test_tenants_never_share_and_the_order_of_fields_never_matters(
    body: dict[str, Any], one: str, other: str, random: Any
) -> None:
    items = list(body.items())
    random.shuffle(items)
    at_one = place((one, "m", "chat", body, []))
    assert at_one == place((one, "m", "chat", dict(items), []))
    assert (at_one == place((other, "m", "chat", body, []))) == (one == other)


def test_names_that_run_into_each_other_are_told_apart() -> None:
    assert partition("ab", "c", "chat", {}) != partition("a", "bc", "chat", {})
    assert partition("a", "b", "chat", {}, ["c"]) != partition("a", "b", "chat", read_fields(b'{"c":1}'))
    assert len(partition("a", "b", "chat", {})) == 32  # whole, never cut


@pytest.mark.parametrize(
    ("key_cache", "header", "most", "mode"),
    [
        ("off", b"", "exact", "off"),
        ("exact", b"", "exact", "exact"),
        ("semantic", b"", "exact", "semantic"),
        ("off", b"exact", "exact", "exact"),
        ("off", b"exact", "off", "off"),
        ("off", b"semantic", "exact", "exact"),  # no more than the operator allows
        ("off", b"semantic", "semantic", "semantic"),
        ("semantic", b"exact", "off", "exact"),
        ("semantic", b"OFF", "semantic", "off"),
    ],
)
def test_a_header_asks_for_less_than_the_key_or_as_much_as_the_operator_allows(
    key_cache: str, header: bytes, most: str, mode: str
) -> None:
    config = CacheConfig(header=most)  # type: ignore[arg-type]
    fields = read_fields(b'{"temperature": 0, "messages": []}')
    assert wanted(config, key_cache, header, "chat", fields) == mode


@pytest.mark.parametrize(
    "body", [b"{}", b'{"temperature": 0.7}', b'{"temperature": null}', b'{"temperature":"0"}']
)
def test_answers_drawn_at_random_are_kept_only_if_asked(body: bytes) -> None:
    fields = read_fields(body)
    assert wanted(CacheConfig(), "exact", b"", "chat", fields) == "off"
    assert wanted(CacheConfig(), "exact", b"exact", "chat", fields) == "exact"
    assert wanted(CacheConfig(sampled=True), "exact", b"", "chat", fields) == "exact"


def test_what_is_computed_needs_no_temperature_and_what_makes_objects_is_never_kept() -> None:
    config = CacheConfig(sampled=True)
    assert wanted(CacheConfig(), "exact", b"", "embeddings", {}) == "exact"
    assert wanted(config, "exact", b"exact", "responses", {}) == "off"
    assert wanted(config, "exact", b"exact", "responses", read_fields(b'{"store":false}')) == "exact"
    searches = read_fields(b'{"store":false,"tools":[{"type":"file_search","vector_store_ids":["vs_1"]}]}')
    assert wanted(config, "exact", b"exact", "responses", searches) == "off"  # the files may change
    in_background = read_fields(b'{"store":false,"background":true}')
    assert wanted(config, "exact", b"exact", "responses", in_background) == "off"
    assert wanted(config, "exact", b"exact", "chat", read_fields(b'{"store":true}')) == "off"
    assert wanted(config, "exact", b"exact", "batches", {}) == "off"


def test_a_header_that_says_nothing_known_is_refused() -> None:
    with pytest.raises(BadRequest, match="x-ridgeline-cache"):
        wanted(CacheConfig(), "exact", b"yes please", "chat", {})
