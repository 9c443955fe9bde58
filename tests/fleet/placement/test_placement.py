"""Placement over capacity pools: rules that always hold, and the cheapest among all placements."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.fleet.placement import (
    GeoFailover,
    PlacedModel,
    Pool,
    PoolsFile,
    place,
    read_pools,
)
from ridgeline.fleet.placement import repack as repacked
from ridgeline.fleet.placement.pack import missing_redundancy, usable, weighed
from ridgeline.fleet.placement.why import explain
from ridgeline.options import OptionError

REGIONS = ("eu-west", "eu-north", "us-east")
pools = st.lists(
    st.builds(
        Pool,
        region=st.sampled_from(REGIONS),
        gpu=st.sampled_from(["h100", "h200"]),
        price=st.integers(1, 9).map(float),
        kind=st.sampled_from(["reserved", "on-demand", "spot"]),
        quota=st.integers(0, 6),
    ),
    min_size=1,
    max_size=4,
).map(lambda found: tuple(replace(pool, name=f"p{n}") for n, pool in enumerate(found)))
models = st.lists(
    st.builds(
        PlacedModel,
        replicas=st.integers(0, 4),
        gpus=st.integers(1, 2),
        gpu=st.sampled_from([(), ("h100",), ("h100", "h200")]),
        residency=st.sampled_from([(), ("eu-*",), ("us-east",)]),
        min_regions=st.integers(1, 2),
        min_pools=st.integers(1, 2),
        max_spot_share=st.sampled_from([0.0, 0.5, 1.0]),
        users=st.sampled_from([{}, {"eu": 1.0}, {"eu": 1.0, "us": 3.0}]),
    ),
    min_size=1,
    max_size=2,
).map(lambda found: tuple(replace(model, name=f"m{n}") for n, model in enumerate(found)))
LATENCY = {"eu": {"eu-west": 10.0, "eu-north": 25.0, "us-east": 90.0}, "us": {"us-east": 8.0}}
files = st.builds(PoolsFile, pools, models, st.just(LATENCY))


def check(file: PoolsFile, replicas: dict[str, dict[str, int]]) -> None:
    by_name = {pool.name: pool for pool in file.pools}
    used = dict.fromkeys(by_name, 0)
    for model in file.models:
        for name, count in replicas.get(model.name, {}).items():
            assert count > 0
            assert not by_name[name].failed
            assert model.may_run_in(by_name[name].region)
            assert not model.gpu or by_name[name].gpu in model.gpu
            used[name] += count * model.gpus
        assert sum(replicas.get(model.name, {}).values()) <= model.replicas
    assert all(used[name] <= pool.quota for name, pool in by_name.items())


def cost(file: PoolsFile, replicas: dict[str, dict[str, int]], current: dict) -> tuple[float, ...]:
    by_name = {pool.name: pool for pool in file.pools}
    unplaced = missing = moves = price = 0.0
    for model in file.models:
        counts = replicas.get(model.name, {})
        unplaced += model.replicas - sum(counts.values())
        missing += missing_redundancy(model, counts, by_name)
        price += sum(n * weighed(file, model, by_name[name]) for name, n in counts.items())
        for name, had in current.get(model.name, {}).items():
            if not usable(file, model, by_name[name]):
                moves += max(0, had - counts.get(name, 0))
    return unplaced, missing, moves, round(price, 6)


def cheapest(file: PoolsFile, current: dict) -> tuple[float, ...]:
    """By trying all."""
    best: tuple[float, ...] = (math.inf,)
    choices = []
    for model in file.models:
        allowed = [pool.name for pool in file.pools if not usable(file, model, pool)]
        choices.append(
            [
                dict(zip(allowed, counts, strict=True))
                for counts in itertools.product(range(model.replicas + 1), repeat=len(allowed))
                if sum(counts) <= model.replicas
            ]
        )
    quotas = {pool.name: pool.quota for pool in file.pools}
    for chosen in itertools.product(*choices):
        used = dict.fromkeys(quotas, 0)
        for model, counts in zip(file.models, chosen, strict=True):
            for name, count in counts.items():
                used[name] += count * model.gpus
        if all(used[name] <= quota for name, quota in quotas.items()):
            whole = {model.name: counts for model, counts in zip(file.models, chosen, strict=True)}
            best = min(best, cost(file, whole, current))
    return best


@settings(max_examples=150, deadline=None)
@given(files)
def test_a_placement_keeps_the_rules_and_none_is_better(file: PoolsFile) -> None:
    found = place(file)
    check(file, found.replicas)
    assert found.proven
    assert cost(file, found.replicas, {}) == pytest.approx(cheapest(file, {}))


@settings(max_examples=100, deadline=None)
@given(files, st.data())
def test_a_failed_pool_is_left_with_the_fewest_moves(file: PoolsFile, data: st.DataObject) -> None:
    before = place(file)
    down = data.draw(st.sampled_from([pool.name for pool in file.pools]))
    after = replace(file, pools=tuple(replace(pool, failed=pool.name == down) for pool in file.pools))
    found = repacked(after, before.replicas)
    check(after, found.replicas)
    assert all(down not in counts for counts in found.replicas.values())
    assert cost(after, found.replicas, before.replicas) == pytest.approx(cheapest(after, before.replicas))


@settings(max_examples=50, deadline=None)
@given(files)
def test_a_good_placement_stays_as_it_is(file: PoolsFile) -> None:
    found = place(file)
    again = repacked(file, found.replicas)
    assert again.replicas == found.replicas
    assert again.moved == 0


def test_a_large_problem_ends_early_with_a_valid_placement_that_says_so() -> None:
    many = tuple(
        Pool(f"p{n}", "x", f"r{n % 5}", "h100", 2.0 + n % 7 / 10, ("spot", "reserved")[n % 2], 40)  # type: ignore[arg-type]
        for n in range(30)
    )
    wanted = tuple(
        PlacedModel(f"m{n}", 60, 1 + n % 4, min_regions=3, min_pools=4, max_spot_share=0.5) for n in range(6)
    )
    file = PoolsFile(many, wanted)
    found = place(file, nodes=20_000)
    check(file, found.replicas)
    assert not found.unplaced
    assert not found.missing
    if not found.proven:
        assert explain(file, found)[-1].startswith("the search ended early")


POOLS = """
[[pools]]
name = "aws-eu"
provider = "aws"
region = "eu-west-1"
gpu = "h100"
price = 4.0
quota = 4

[[pools]]
name = "cheap-us"
provider = "other"
region = "us-east"
gpu = "h100"
price = 2.0
kind = "spot"
quota = 16

[[models]]
name = "chat"
replicas = 3
residency = ["eu-*"]

[[models]]
name = "batch"
replicas = 4
max_spot_share = 0.5
[models.users]
eu = 1

[latency.eu]
eu-west-1 = 12
us-east = 95
"""


def test_the_file_is_read_and_each_choice_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "pools.toml"
    path.write_text(POOLS)
    file = read_pools(path)
    found = place(file)
    assert found.of("chat") == {"aws-eu": 3}
    assert found.unplaced == {}
    assert found.missing == {"batch": 1}  # one replica of aws-eu is left
    lines = "\n".join(explain(file, found))
    assert "residency: us-east is not in eu-*" in lines
    assert "3 of 3 replicas placed" in lines
    assert "redundancy is incomplete" in lines


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("price = 4.0", "prise = 4.0"), "did you mean 'price'"),
        (("price = 4.0", "price = -1.0"), "price must be from 0"),
        (('name = "cheap-us"', 'name = "aws-eu"'), "'aws-eu' is used twice"),
        (("[latency.eu]", "[latencies.eu]"), "did you mean 'latency'"),
        (("eu = 1", "eu = -1"), "must be a number of 0 or more"),
        (("replicas = 3", "replicas = 3\nuser = 1"), "unknown key 'user'"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "pools.toml"
    path.write_text(POOLS.replace(*change))
    with pytest.raises(OptionError, match=said):
        read_pools(path)


def test_a_region_that_fails_requests_adds_at_most_a_tenth_of_retries_to_the_others() -> None:
    failover = GeoFailover(clock=lambda: 0.0)
    for _ in range(1000):  # the region fails every request, and the router does not know that it is down
        failover.request()
        if failover.may_leave({"eu-west"}, REGIONS):
            failover.went({"eu-west"}, REGIONS, "eu-north")
    assert 100 <= failover.moves == failover.paid <= 100 + 10
    assert not failover.may_leave({"eu-west"}, REGIONS)
    for _ in range(50):  # known to be down: no retry is paid for
        assert failover.may_leave({"eu-west"}, {"eu-north"})
        failover.went({"eu-west"}, {"eu-north"}, "eu-north")
    assert failover.paid <= 110 < failover.moves
    moved = failover.moves
    failover.went({"eu-west"}, REGIONS, "eu-west")  # another replica of the same region
    assert failover.moves == moved
