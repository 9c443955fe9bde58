"""A Ray cluster that goes away is an error of the substrate, which the controller expects. Needs no Ray."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.config_substrates import RayConfig
from ridgeline.fleet.substrates import ray as ray_module
from ridgeline.fleet.substrates.ray import RaySubstrate
from ridgeline.fleet.substrates.substrate import Handle, Observed, SubstrateError


class RayError(Exception):
    pass


@pytest.mark.parametrize("error", [RayError("the GCS is gone"), ConnectionError("the GCS is gone")])
async def test_a_cluster_that_is_gone_is_a_substrate_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(mark: str) -> Observed:
        raise error

    substrate = RaySubstrate(RayConfig())
    substrate._ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError))
    monkeypatch.setattr(substrate, "_poll", fails)
    with pytest.raises(SubstrateError, match="does not answer: the GCS is gone"):
        await substrate.poll(Handle("chat-1", "fleet/chat-1"))


def test_the_endings_of_replicas_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    substrate = RaySubstrate(RayConfig())
    monkeypatch.setattr(substrate, "_release", lambda mark: None)
    for number in range(ray_module.KEPT_ENDINGS + 10):
        substrate._end(f"fleet/chat-{number}", Observed("exited"))
    assert len(substrate._endings) == ray_module.KEPT_ENDINGS
    assert "fleet/chat-9" not in substrate._endings


async def test_an_adopted_replica_is_begun_again_unless_it_is_about_to_end() -> None:
    begun: list[tuple[str, dict[str, str]]] = []

    def get_actor(name: str, namespace: str) -> SimpleNamespace:
        if name == "fleet/chat-3":
            raise ValueError("no such actor")
        begin = SimpleNamespace(remote=lambda environment: begun.append((name, environment)))
        return SimpleNamespace(begin=begin)

    substrate = RaySubstrate(RayConfig())
    substrate._ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError), get_actor=get_actor)
    key = {"RIDGELINE_API_KEYS": "key"}
    await substrate.adopt(Handle("chat-1", "fleet/chat-1"), key)
    await substrate.adopt(Handle("chat-2", "fleet/chat-2"), None)
    await substrate.adopt(Handle("chat-3", "fleet/chat-3"), key)  # it has died
    assert begun == [("fleet/chat-1", key)]


class Jumping:
    """A monotonic clock that `jump` sets ahead: this process stood still."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


async def test_a_drain_outlasts_a_time_for_which_the_controller_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The actor goes on with the drain: it is released when it has answered, and no thread waits for that."""
    clock, done = Jumping(), []
    stop = SimpleNamespace(remote=lambda drain_s: done.append(drain_s) or "answer")

    def wait(answers: list[str], timeout: float) -> tuple[list[str], list[str]]:
        assert timeout == 0
        clock.ahead_s += 3600.0
        done.append("asked")
        return (answers, []) if len(done) > 4 else ([], answers)

    substrate = RaySubstrate(RayConfig())
    substrate._ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError), wait=wait)
    substrate._actors["fleet/chat-1"] = SimpleNamespace(stop=stop)
    monkeypatch.setattr(ray_module, "POLL_S", 0.0)
    monkeypatch.setattr(ray_module, "AwakeClock", lambda: AwakeClock(clock))
    monkeypatch.setattr(substrate, "_is_placed", lambda mark: True)
    monkeypatch.setattr(substrate, "_release", lambda mark: done.append("released"))
    await substrate.stop(Handle("chat-1", "fleet/chat-1"), 30.0)
    assert done == [30.0, "asked", "asked", "asked", "asked", "released"]


async def test_an_actor_that_never_answers_is_released_after_the_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[str] = []
    substrate = RaySubstrate(RayConfig())
    wait = lambda answers, timeout: ([], answers)  # noqa: E731
    substrate._ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError), wait=wait)
    substrate._actors["fleet/chat-1"] = SimpleNamespace(stop=SimpleNamespace(remote=lambda drain_s: "answer"))
    for name in ("KILL_GRACE_S", "ANSWER_S", "POLL_S"):
        monkeypatch.setattr(ray_module, name, 0.01)
    monkeypatch.setattr(substrate, "_is_placed", lambda mark: True)
    monkeypatch.setattr(substrate, "_release", released.append)
    await substrate.stop(Handle("chat-1", "fleet/chat-1"), 0.05)
    assert released == ["fleet/chat-1"]
