"""Two real replicas with separate caches: the second gets weights and packed weights from the first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.replica.cold_starts import read_starts
from tests.fleet.controller.live_fleet import LiveFleet

MORE = """
[models.weights]
sources = ["local", "peers", "file://{store}"]
[substrate.local]
separate_caches = true
"""


@pytest.mark.slow
def test_a_second_replica_with_an_empty_cache_is_fed_by_the_first(smollm2_path: Path, tmp_path: Path) -> None:
    """No source but the store and the peer is configured, and the store is gone when the second starts."""
    store = tmp_path / "store"
    export = [sys.executable, "-m", "ridgeline.cli.main", "models", "export", "smollm2-135m", str(store)]
    subprocess.run([*export, "--no-caches"], check=True, capture_output=True, timeout=300)
    fleet = LiveFleet(tmp_path, 1, MORE.format(store=store))
    try:
        fleet.up()
        fleet.fleet = fleet.status()["fleet"]
        first = fleet.replicas("ramping", "ready")[0]
        assert first["weights"]["source"] == f"store {store}"
        assert first["weights"]["bytes"] == smollm2_path.stat().st_size
        (store / "manifest.json").unlink()

        assert fleet.run("scale", "chat", "2").returncode == 0
        fleet.until(lambda: fleet.serving_ids() == {"chat-1", "chat-2"}, "chat-2 serves")
        fleet.until(lambda: all(one["weights"] for one in fleet.status()["replicas"]), "its feed has told")
        second = next(one for one in fleet.status()["replicas"] if one["id"] == "chat-2")
        weights = second["weights"]
        assert (weights["source"], weights["bytes"]) == ("peer chat-1", smollm2_path.stat().st_size)
        assert (weights["cache"]["kind"], weights["cache"]["source"]) == ("packed weights", "peer chat-1")
        assert {"fetch", "fetch cache", "first_token"} <= set(second["segments"])
        caches = [fleet.state_dir / "replicas" / name / "cache" for name in ("chat-1", "chat-2")]
        packed = [next((cache / "packed").glob("*.packed")) for cache in caches]
        assert packed[0].name != packed[1].name  # each key has the path of its source
        for cache in caches:
            assert not list((cache / "models").rglob(".*.partial"))
            assert [path for path in cache.glob("archives/*") if path.name != ".lock"] == []
        log = (fleet.state_dir / "logs" / "chat-2.log").read_text()
        assert "from peer chat-1" in log
        shown = fleet.run("status", "--once").stdout
        assert "98 MB from peer chat-1" in shown
        assert "packed weights from peer chat-1" in shown

        # Both compute the same.
        answers = {fleet.ask("Name a colour.") for _ in range(4)}
        assert len(answers) == 1

        fleet.until(lambda: len(read_starts(fleet.state_dir)) == 2, "both starts are recorded")
        kept = read_starts(fleet.state_dir)[-1]
        assert kept.weights is not None
        assert kept.weights.source == "peer chat-1"
        assert kept.segments["total"] >= kept.segments["fetch"] > 0

        assert fleet.run("down").returncode == 0
        assert fleet.pids() == []
        assert not any(cache.exists() for cache in caches)
    finally:
        fleet.close()
