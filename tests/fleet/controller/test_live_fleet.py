"""A real fleet of SmolLM2 replicas: started, killed, taken over, rolled, and ended without a trace."""

from __future__ import annotations

import os
import signal
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.controller.live_fleet import LiveFleet, Load


@pytest.fixture
def fleet(smollm2_path: Path, tmp_path: Path) -> Iterator[LiveFleet]:
    made = LiveFleet(tmp_path)
    yield made
    made.close()


def test_a_fleet_survives_its_parts_and_leaves_no_process(fleet: LiveFleet) -> None:
    fleet.up()
    status = fleet.status()
    fleet.fleet = status["fleet"]
    first = fleet.ask("Name a colour.")
    shown = fleet.run("status", "--once").stdout
    assert all(word in shown for word in ("chat-1", "chat-2", "2 of 2 serve", "first_token"))
    assert all("spawn" in one["segments"] for one in status["replicas"])  # too short to be shown

    # A second controller on the same directory is refused.
    second = fleet.run("up", str(fleet.file))
    assert (second.returncode, "another controller" in second.stderr) == (2, True)

    # A killed replica is replaced under a new id, and requests go on.
    os.kill(fleet.pid_of("chat-1"), signal.SIGKILL)
    assert fleet.ask("Name a colour.") == first
    fleet.until(lambda: fleet.serving_ids() == {"chat-2", "chat-3"}, "chat-3 serves")
    events = {event["kind"]: event for event in fleet.client.get("/fleet/events")["events"]}
    assert "signal 9" in events["lost"]["text"]
    assert events["ready"]["facts"]["total"] >= events["ready"]["facts"]["first_token"] > 0

    # Without its controller the fleet serves on; the next controller takes everything over.
    url, generation, before = fleet.url, fleet.status()["generation"], set(fleet.pids())
    fleet.kill_controller()
    fleet.up()
    after = fleet.status()
    assert (after["url"], {one["id"] for one in after["replicas"]}) == (url, {"chat-2", "chat-3"})
    assert after["generation"] > generation
    assert after["fence"] > status["fence"]
    assert set(fleet.pids()) == before
    assert fleet.ask("Name a colour.") == first

    # Down ends all of it, also without a controller.
    fleet.kill_controller()
    down = fleet.run("down")
    assert down.returncode == 0, down.stderr
    assert fleet.pids() == []


@pytest.mark.slow
def test_a_roll_under_load_fails_no_request(fleet: LiveFleet) -> None:
    fleet.up()
    fleet.fleet = fleet.status()["fleet"]
    old = fleet.status()["models"][0]["version"]
    with Load(fleet, threads=3) as load:
        fleet.until(lambda: load.answers > 5, "answers")
        fleet.write(kv_tokens=4096)
        rolled = fleet.run("roll", "--wait")
        seen = load.answers
        fleet.until(lambda: load.answers > seen + 5, "answers of the new version")
        scaled = fleet.run("scale", "chat", "1")
        fleet.until(lambda: len(fleet.status()["replicas"]) == 1, "one replica is left")
    assert (rolled.returncode, load.failures) == (0, []), rolled.stdout
    assert scaled.stdout == "chat: from 2 to 1 replicas\n"
    status = fleet.status()
    assert status["models"][0]["version"] != old
    assert {one["version"] for one in status["replicas"]} == {status["models"][0]["version"]}
    assert fleet.run("down").returncode == 0
    assert fleet.pids() == []


@pytest.mark.slow
def test_a_version_that_cannot_start_is_rolled_back_and_the_old_one_serves(fleet: LiveFleet) -> None:
    fleet.up()
    fleet.fleet = fleet.status()["fleet"]
    old = fleet.status()["models"][0]["version"]
    with Load(fleet, threads=2) as load:
        rolled = fleet.run("roll", "chat", "--set", "source=/nowhere/model.gguf", "--wait")
    assert (rolled.returncode, load.failures) == (1, []), rolled.stderr
    assert "failed to start" in rolled.stdout
    assert fleet.status()["models"][0]["version"] == old
    assert fleet.serving() == 2
    assert fleet.run("down").returncode == 0
    assert fleet.pids() == []


@pytest.mark.slow
def test_a_model_is_added_and_removed_without_a_restart(fleet: LiveFleet) -> None:
    fleet.up()
    fleet.fleet = fleet.status()["fleet"]
    before, processes = fleet.serving_ids(), set(fleet.pids())
    text = fleet.file.read_text()
    second = '[[models]]\nname = "other"\nsource = "smollm2-135m"\n[models.serve]\nkv_tokens = 2048\n'
    fleet.file.write_text(text + second)
    assert fleet.run("roll").stdout == "other: added; its replicas start\n"
    fleet.until(lambda: fleet.serving() == 3, "the replica of the new model serves")
    assert fleet.ask("Name a colour.", model="other")
    fleet.file.write_text(text)
    assert fleet.run("roll").stdout == "other: removed; its replicas drain\n"
    fleet.until(lambda: len(fleet.status()["replicas"]) == 2, "its replica has ended")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fleet.ask("Name a colour.", model="other")
    assert (fleet.serving_ids(), set(fleet.pids())) == (before, processes)
    assert fleet.ask("Name a colour.")
    assert fleet.run("down").returncode == 0
    assert fleet.pids() == []


@pytest.mark.slow
def test_a_roll_without_traffic_is_judged_by_a_probe(fleet: LiveFleet) -> None:
    fleet.file.write_text(fleet.file.read_text().replace("canary_s", "judge_s = 1.0\ncanary_s"))
    fleet.up()
    fleet.fleet = fleet.status()["fleet"]
    rolled = fleet.run("roll", "chat", "--set", "kv_tokens=4096", "--wait")
    assert (rolled.returncode, "done" in rolled.stdout) == (0, True), rolled.stdout
    told = [event["text"] for event in fleet.client.get("/fleet/events")["events"]]
    assert any("no traffic to judge by; chat-3 is probed" in text for text in told), told
    assert any("no traffic to judge by; the canary generated when probed" in text for text in told), told
    assert fleet.run("down").returncode == 0
    assert fleet.pids() == []
