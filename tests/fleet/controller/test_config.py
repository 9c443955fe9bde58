"""fleet.toml: what it says, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.fleet.config import make_fleet, read_fleet
from ridgeline.options import OptionError

FILE = """
[fleet]
port = 9000
budget = 10

[substrate]
kind = "local"
[substrate.local]
cpus = 8

[[models]]
name = "chat"
source = "smollm2-135m"
aliases = ["gpt-4o"]
replicas = 2
policy = "prefix"
[models.serve]
kv_tokens = 4096
speculate = false
lora = ["a=./a"]
[models.resources]
cpus = 1
[models.scaling]
min = 1
max = 4
[models.rollout]
surge = 2
"""


def one(**model: object) -> dict[str, object]:
    return {"models": [{"name": "chat", **model}]}


def test_every_table_of_the_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    settings = read_fleet(path, {"port": 9001})
    model = settings.model("gpt-4o")
    assert model is not None
    assert (settings.fleet.port, settings.substrate_options.cpus) == (9001, 8)
    assert (model.name, model.source, model.model.policy) == (
        "chat",
        "smollm2-135m",
        "prefix",
    )
    assert model.serve == {"kv_tokens": 4096, "speculate": False, "lora": ("a=./a",)}
    assert (model.most, model.scales, model.rollout.surge, model.limits.max_held) == (4, True, 2, 1024)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"fleat": {}}, "did you mean 'fleet'"),
        ({"fleet": {"prot": 1}}, "did you mean 'port'"),
        (one(replica=2), "did you mean 'replicas'"),
        (one(scalling={"min": 1}), "did you mean 'scaling'"),
        (one(scaling={"maxx": 1}), "did you mean 'max'"),
        (one(scaling={"min": 3, "max": 2}), "more than max"),
        (one(replicas=3, scaling={"max": 2}), "more than max and budget allow"),
        (one(replicas=3, scaling={"max": 9, "budget": 2.0}), "more than max and budget allow"),
        (one(replicas=0, scaling={"max": 2}), "less than"),
        (one(serve={"port": 8000}), "set by the fleet itself"),
        (one(serve={"kv_tokens": {}}), "must be text, a number"),
        (one(rollout={"surge": 0}), "both 0"),
        (one(places={"region": "eu"}), "places is a list"),
        (one(places=[{"regin": "eu"}]), "did you mean 'region'"),
        (one(places=[{"pool": "spot"}]), "has no region"),
        (one(places=[{"region": "eu"}] * 2), "stand there twice"),
        (one(places=[{"region": "eu"}], resources={"region": "us"}), "without \\[\\[models.places"),
        (one(places=[{"region": "eu"}, {"region": "us"}], residency=["eu*"]), "run in region 'us'"),
        (one(residency=["eu"]), "a place without a region"),
        ({"latency": {"eu": 3}, **one()}, "must be a table"),
        ({"latency": {"eu": {"us": -1}}, **one()}, "a number of 0 or more"),
        (one(scaling=3), "must be a table, not 3"),
        ({"substrate": {"kind": "rey"}, **one()}, "did you mean 'ray'"),
        ({"substrate": {"lokal": {}}, **one()}, "did you mean 'local'"),
        ({}, "no model"),
        ({"models": [{"source": "x"}]}, "has no name"),
        ({"models": [{"name": "a"}, {"name": "b", "aliases": ["a"]}]}, "two models have the name"),
        ({"models": [{"name": "a.b"}, {"name": "a-b"}]}, "would have the same ids"),
        ({"fleet": {"budget": 1.0}, **one(replicas=2)}, "replicas cost 2 per hour, more than"),
        (
            {"substrate": {"local": {"memory": 7}}, **one(replicas=2, resources={"memory": 4})},
            "replicas need 8 GiB of memory, more than \\[substrate.local\\] memory \\(7\\)",
        ),
        (
            {"substrate": {"local": {"cpus": 3}}, **one(replicas=2, resources={"cpus": 2})},
            "replicas need 4 CPUs, more than \\[substrate.local\\] cpus \\(3\\)",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_change(document: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_fleet(document)


def test_the_version_changes_with_what_replicas_run_and_with_nothing_else() -> None:
    def version(**model: object) -> str:
        return make_fleet(one(**model)).models[0].version

    base = version(source="m")
    assert base == version(source="m", replicas=5, policy="lora", scaling={"max": 9}, limits={"hold_s": 1})
    changed = [
        version(source="n"),
        version(source="m", serve={"kv_tokens": 1}),
        version(source="m", resources={"cpus": 1}),
    ]
    assert len({base, *changed}) == 4


def test_an_empty_key_file_does_not_open_the_fleet(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none\n")
    settings = make_fleet({"fleet": {"api_key_file": str(path)}, **one()})
    with pytest.raises(OptionError, match="has no key"):
        assert settings.keys
    path.write_text("a # first\nb\n")
    assert settings.keys == ("a", "b")


@pytest.mark.parametrize(
    ("tables", "durable"),
    [
        ({}, False),
        ({"scaling": {"min": 0}}, True),
        ({"scaling": {"min": 1}}, False),
        ({"scaling": {"min": 0}, "limits": {"durable": False}}, False),
        ({"limits": {"durable": True}}, True),
    ],
)
def test_held_requests_are_journalled_where_a_model_scales_to_zero_or_asks_for_it(
    tables: dict[str, object], durable: bool
) -> None:
    (model,) = make_fleet({"models": [{"name": "chat", **tables}]}).models
    assert model.is_durable is durable
