"""Replicas follow changed places in every order of events, and enough of them serve meanwhile."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.fleet.config import make_fleet
from ridgeline.fleet.controller.managed_model import ManagedModel
from ridgeline.fleet.controller.reconcile import ReplicaView
from ridgeline.fleet.controller.room import Room


def managed(target: int, surge: int, unavailable: int, barred: bool) -> ManagedModel:
    model = {
        "name": "chat",
        "replicas": target,
        "places": [{"region": "eu"}],
        "residency": ["eu"] if barred else [],
        "rollout": {"surge": surge, "unavailable": unavailable},
    }
    return ManagedModel(make_fleet({"models": [model]}).models[0], None, 0.0)


@given(
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 3),
    st.lists(st.sampled_from(["step", "ready", "ended"]), max_size=40),
)
@settings(max_examples=80, deadline=None)
def test_replicas_move_and_enough_serve(
    target: int, surge: int, unavailable: int, barred: bool, spare: int, events: list[str]
) -> None:
    if surge == unavailable == 0:
        surge = 1
    model = managed(target, surge, unavailable, barred)
    version = model.state.current.version
    replicas = [ReplicaView(f"us-{n}", version, "ready", 0.0, region="us") for n in range(target)]
    room, made = target + spare, 0
    for event in events + ["step", "ready", "ended"] * 30:
        if event == "ready":
            replicas = [
                msgspec.structs.replace(one, state="ready") if one.state == "starting" else one
                for one in replicas
            ]
        elif event == "ended":
            replicas = [one for one in replicas if one.state != "draining"]
        else:
            actions = model.step(replicas, Room(max(room - len(replicas), 0)), 0.0)
            replicas = [
                msgspec.structs.replace(one, state="draining") if one.id in actions.drain else one
                for one in replicas
            ]
            for _ in actions.start:
                replicas.append(ReplicaView(f"eu-{made}", version, "starting", 0.0, region="eu"))
                made += 1
        assert len(replicas) <= room
        serving = sum(one.serves for one in replicas)
        assert barred or serving >= target - unavailable
    regions = [one.region for one in replicas]
    if barred or unavailable or spare:
        assert regions == ["eu"] * target
    else:  # the budget has no room for one more replica
        assert regions == ["us"] * target


def test_a_failed_start_is_told_until_another_replica_is_there() -> None:
    model = managed(1, 1, 0, False)
    version = model.state.current.version
    model.restarts_of(version).failed(0.0, "exit code 1")
    assert model.step([], Room(1), 0.0).start == ()
    assert model.blocked == "1 failed starts; exit code 1"
    model.step([ReplicaView("eu-0", version, "ready", 100.0, region="eu")], Room(1), 100.0)
    assert model.blocked == ""
