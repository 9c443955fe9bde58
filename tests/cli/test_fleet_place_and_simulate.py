"""`ridgeline fleet place` and `ridgeline simulate fleet`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.main import main

POOLS = """
[[pools]]
name = "a"
region = "eu"
gpu = "h100"
price = 1.0
quota = 2

[[pools]]
name = "b"
region = "us"
gpu = "h100"
price = 2.0
quota = 4

[[models]]
name = "m"
replicas = 3
"""
FLEET = """
[[models]]
name = "m"
source = "smollm2-135m"
replicas = 2
[models.limits]
hold_s = 600
"""


def test_place_says_why_and_repacks_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pools.toml"
    path.write_text(POOLS)
    assert main(["fleet", "place", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "2 in a (eu, on-demand): $1.00/h each; the best allowed pool" in printed
    assert "better pools are full: a" in printed
    assert main(["fleet", "place", str(path), "--json"]) == 0
    current = tmp_path / "placement.json"
    current.write_text(capsys.readouterr().out)
    assert json.loads(current.read_text())["replicas"] == {"m": {"a": 2, "b": 1}}
    assert main(["fleet", "place", str(path), "--current", str(current), "--failed", "b"]) == 1
    assert "1 not placed" in capsys.readouterr().out
    assert main(["fleet", "place", str(path), "--failed", "c"]) == 2


def test_simulate_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    flags = "--rate 20 --requests 60 --input 64 --output 16 --hardware h200 --seeds 2"
    assert main(["simulate", "fleet", str(path), *flags.split(), "--policies", "round-robin,default"]) == 0
    printed = capsys.readouterr().out
    assert "2 replicas" in printed
    assert "ratio to round-robin" in printed
    assert main(["simulate", "fleet", str(path), "--policies", "fastest", "--rate", "1"]) == 2
    assert main(["simulate", "fleet", str(path)]) == 2
    assert main(["simulate", "fleet", str(path), "--concurrency", "2"]) == 2
    assert "--concurrency is for `simulate engine`" in capsys.readouterr().err
