"""A Ray cluster that goes away is an error of the substrate, which the controller expects. Needs no Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
