"""Regions: the nearest is preferred, residency holds always, and a failure moves on without a storm."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry
from ridgeline.fleet.placement.regions import all_allow
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.choose import Choice, choose
from ridgeline.fleet.routing.policy import POLICIES, Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.fleet.routing.regions import Regions
from ridgeline.proxy.errors import NoReplica
from tests.fleet.routing.fleets import Clock, entry, load, started, table

LATENCY = {"eu": {"uk": 15.0, "us": 90.0, "asia": 210.0}, "us": {"asia": 160.0}}
REGIONS = ("eu", "uk", "us", "asia")


def book_in(*regions: str) -> LoadBook:
    book = LoadBook(Clock())
    entries = [entry(number, region=region) for number, region in enumerate(regions)]
    book.set_table(msgspec.structs.replace(table(*entries), latency_ms=LATENCY))
    for one in entries:
        book.hear(one.id, started(one.epoch))
        book.hear(one.id, load())
    return book


def chosen(book: LoadBook, prompt: PromptView, policy: str = "default", seed: int = 1) -> str:
    found = choose(book, PrefixMap(), prompt, Policy(policy), Random(seed), 100.0)  # type: ignore[arg-type]
    return "" if found is None else book.rows[found.replica_id].entry.region


@pytest.mark.parametrize("policy", POLICIES)
def test_the_nearest_region_serves_and_the_next_nearest_when_it_is_lost(policy: str) -> None:
    book = book_in("asia", "us", "uk", "eu", "us", "eu")
    prompt = PromptView("m", (), 640, region="eu", session="s")
    order = []
    for _ in range(len(REGIONS)):
        regions = {chosen(book, prompt, policy, seed) for seed in range(20)}
        assert len(regions) == 1
        order += regions
        for row in list(book.rows.values()):
            if row.entry.region in regions:
                book.lost(row.entry.id)
    assert order == ["eu", "uk", "us", "asia"]
    assert chosen(book, prompt, policy) == ""


def test_the_default_leaves_a_region_whose_wait_is_longer_than_the_way_to_the_next() -> None:
    book = book_in("eu", "uk", "us")
    prompt = PromptView("m", (), 640, region="eu")
    book.hear("m-0", load(queued_tokens=4000))
    assert chosen(book, prompt) == "uk"
    assert chosen(book, PromptView("m", (), 640, region="eu", residency=(("eu",),))) == "eu"


@given(
    regions=st.lists(st.sampled_from(("", *REGIONS)), min_size=1, max_size=8),
    rules=st.lists(
        st.lists(st.sampled_from(("eu", "u*", "*", "asia")), max_size=2).map(tuple), max_size=2
    ).map(tuple),
    own=st.sampled_from(("", *REGIONS)),
    policy=st.sampled_from(POLICIES),
    busy=st.sets(st.integers(0, 7)),
)
def test_residency_holds_for_every_policy_and_load(
    regions: list[str], rules: tuple[tuple[str, ...], ...], own: str, policy: str, busy: set[int]
) -> None:
    book = book_in(*regions)
    for number in busy:
        book.hear(f"m-{number}", load(running=7, queued_tokens=9000))
    prompt = PromptView("m", (), 640, region=own, residency=rules)
    found = choose(book, PrefixMap(), prompt, Policy(policy), Random(3), 100.0)  # type: ignore[arg-type]
    allowed = [region for region in regions if all_allow(rules, region)]
    assert (found is not None) == bool(allowed) == bool(book.candidates("m", rules))
    if found is not None:
        assert all_allow(rules, book.rows[found.replica_id].entry.region)


def test_a_request_that_no_region_may_compute_is_refused_at_once() -> None:
    regions = Regions("eu", {"r": _Replica(entry(0, region="us"))}, Clock())
    model = ModelEntry("m", regions=("us", "uk"))
    assert regions.rules_of(model, (("u*",),)) == (("u*",),)
    assert regions.rules_of(model, ((),)) == ()
    with pytest.raises(NoReplica, match="residency allows the regions eu; m has replicas in: uk, us"):
        regions.rules_of(model, (("eu",),))
    with pytest.raises(NoReplica, match="asia and u"):
        regions.rules_of(msgspec.structs.replace(model, residency=("asia",)), (("u*",),))


@dataclass
class _Replica:
    entry: ReplicaEntry
    is_lost: bool = False
    died_at: float = -inf
    heard_at: float = 100.0
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.entry.id


class _Fleet:
    """Two regions with two replicas each, eu the nearer; `choose` takes the first that is not excluded."""

    def __init__(self) -> None:
        made = [_Replica(entry(number, region=("eu", "us")[number // 2])) for number in range(4)]
        self.replicas = {one.id: one for one in made}
        self.regions = Regions("eu", self.replicas, Clock())

    def again(self, *failed: str, inhibited: tuple[str, ...] = ()) -> str:
        def first(exclude: object) -> Choice | None:
            left = [id for id, one in self.replicas.items() if id not in exclude and not one.is_lost]  # type: ignore[operator]
            return Choice(left[0], "load", 0.0, 0) if left else None

        found = self.regions.choose_again(first, "m", failed, inhibited)
        return "" if found is None else found.replica_id


def test_a_request_goes_on_in_its_region_while_that_reports() -> None:
    fleet = _Fleet()
    fleet.replicas["m-0"].died_at = 99.0  # m-1 has reported since
    assert fleet.again("m-0", inhibited=("m-0",)) == "m-1"
    assert fleet.regions.failover.moves == 0


def test_a_request_leaves_a_region_in_doubt_and_pays_for_it_until_the_budget_is_spent() -> None:
    fleet = _Fleet()
    fleet.replicas["m-0"].died_at = 100.5  # no replica of the region has reported since
    moved = [fleet.again("m-0", inhibited=("m-0",)) for _ in range(20)]
    assert moved == ["m-2"] * 10 + ["m-1"] * 10  # a balance of ten, and no new request
    assert fleet.regions.failover.paid == 10
    assert fleet.again("m-0", "m-1", inhibited=("m-0",)) == ""  # it waits: m-1 may come back
    for _ in range(11):
        fleet.regions.failover.request()
    assert fleet.again("m-0", "m-1", inhibited=("m-0",)) == "m-2"


def test_leaving_a_region_that_is_down_costs_nothing() -> None:
    fleet = _Fleet()
    fleet.replicas["m-0"].died_at = 100.5
    fleet.replicas["m-1"].is_lost = True
    assert {fleet.again("m-0", inhibited=("m-0",)) for _ in range(50)} == {"m-2"}
    assert (fleet.regions.failover.moves, fleet.regions.failover.paid) == (50, 0)
    assert fleet.regions.states(("m-0",)) == {"eu": False, "us": True}


def test_a_doubted_region_is_used_again_where_no_other_is_left() -> None:
    fleet = _Fleet()
    fleet.replicas["m-0"].died_at = 100.5
    fleet.replicas["m-2"].is_lost = fleet.replicas["m-3"].is_lost = True
    assert fleet.again("m-0", inhibited=("m-0",)) == "m-1"
