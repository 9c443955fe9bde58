"""`plan --pools`: the plan's replicas over capacity pools, by the classes of `fleet place`, and why."""

import json
import tomllib
from pathlib import Path

import pytest

from ridgeline.fleet.config import make_fleet
from ridgeline.fleet.placement import PlacedModel, PoolsFile, place, read_pools
from ridgeline.lab.plan.make_plan import make_plan
from ridgeline.lab.plan.options import PlanOptions
from ridgeline.lab.plan.plan_types import Plan
from ridgeline.lab.plan.reports.placed import place_plan, placed_facts, placed_lines
from ridgeline.lab.plan.request import read_request
from ridgeline.lab.traffic.options import TrafficOptions
from tests.lab.plan.test_plan import LLAMA, TRAFFIC, llama, own_cache, plan

__all__ = ["llama", "own_cache"]  # fixtures
POOLS = """
[[pools]]
name = "own-eu"
region = "eu-central"
gpu = "h200"
price = 2.0
kind = "reserved"
quota = 1
[[pools]]
name = "cloud-eu"
region = "eu-west"
gpu = "h200"
price = 4.0
quota = 16
[[pools]]
name = "spot-us"
region = "us-east"
gpu = "h200"
price = 1.0
kind = "spot"
quota = 64
[[pools]]
name = "other-gpu"
region = "eu-west"
gpu = "a100"
price = 0.5
quota = 64
"""
RULES = """
[[models]]
name = "Llama-3.1-8B"
replicas = 77
residency = ["eu-*"]
min_regions = 2
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Two or more replicas of one GPU each."""
    folder = tmp_path_factory.mktemp("model") / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    traffic = TrafficOptions(input="512", output="32", requests=200, rate=250.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_CACHE", str(folder))
        return make_plan(read_request(str(folder), PlanOptions(hardware="h200"), traffic))


def read(tmp_path: Path, text: str) -> PoolsFile:
    path = tmp_path / "pools.toml"
    path.write_text(text)
    return read_pools(path, needs_models=False)


def test_the_plans_replicas_are_placed_within_the_files_rules(planned: Plan, tmp_path: Path) -> None:
    file = read(tmp_path, POOLS + RULES)
    found, replicas = place_plan(planned, file), planned.replicas
    assert replicas >= 2
    assert placed_facts(found)["replicas"] == {"own-eu": 1, "cloud-eu": replicas - 1}
    assert found.usd_per_hour == pytest.approx(2.0 + 4.0 * (replicas - 1))
    why = "\n".join(placed_lines(found))
    assert f"Llama-3.1-8B: {replicas} of {replicas} replicas placed" in why
    assert "0 in spot-us: residency: us-east is not in eu-*" in why
    assert "0 in other-gpu: a100 is not one of its GPUs (h200)" in why
    # The same as the fleet's own placement of that many replicas.
    same = PlacedModel("Llama-3.1-8B", replicas, 1, ("h200",), residency=("eu-*",), min_regions=2)
    assert place(PoolsFile(file.pools, (same,))).of("Llama-3.1-8B") == found.placement.of(found.model)


def test_without_models_in_the_file_price_alone_decides_and_the_places_go_into_fleet_toml(
    planned: Plan, tmp_path: Path
) -> None:
    lines = list(placed_lines(place_plan(planned, read(tmp_path, POOLS))))
    assert any("in spot-us (us-east, spot): $1.00/h each; the best allowed pool" in one for one in lines)
    toml = "\n".join(line.strip() for line in lines[lines.index("  for fleet.toml:") + 1 :])
    places = tomllib.loads(toml)["models"]["places"]
    fleet = make_fleet({"models": [{"name": "a", "places": places}]})
    assert [(one.key, one.weight) for one in fleet.models[0].spread] == [
        (("us-east", "spot-us"), float(planned.replicas))
    ]


def test_other_models_of_the_file_use_the_same_quotas(planned: Plan, tmp_path: Path) -> None:
    other = '\n[[models]]\nname = "other"\nreplicas = 64\ngpu = ["h200"]\n'
    found = place_plan(planned, read(tmp_path, POOLS + other))
    assert sum(found.placement.of(found.model).values()) == planned.replicas
    assert sum(found.placement.of("other").values()) == 64
    used = [sum(of.get("spot-us", 0) for of in found.placement.replicas.values())]
    assert used == [64]


def test_the_command_prints_the_places_and_fails_where_pools_are_too_small(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pools.toml"
    path.write_text(POOLS + "[latancy]\n")
    given = (llama, "--hardware", "h200", *TRAFFIC, "--rate", "250", "--pools", str(path))
    assert plan(*given, "--out", str(tmp_path / "out")) == 2
    assert "did you mean 'latency'" in capsys.readouterr().err
    path.write_text(POOLS.replace("quota = 16", "quota = 0").replace("quota = 64", "quota = 0"))
    assert plan(*given, "--out", str(tmp_path / "out")) == 1
    text = capsys.readouterr().out
    assert "Where the replicas run" in text
    assert "not placed: the allowed pools are full" in text
    assert "at the list price of h200" in text
