"""The controller's own decisions, on replicas that are records only: no process runs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from ridgeline.cli.fleet.commands import wait_for
from ridgeline.fleet.controller.api.commands import CommandRefused, Commands
from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.substrates.substrate import Handle, ReplicaSpec
from ridgeline.replica.messages import Load, Started
from tests.fleet.controller.ruled import Ruled, shown
from tests.patience import PATIENCE_S


async def test_a_probe_that_finds_no_canary_does_not_wake_the_loop(ruled: Ruled) -> None:
    controller = await ruled.controller(ruled.settings({"name": "chat"}))
    await controller.reconfigure(ruled.settings({"name": "chat", "serve": {"kv_tokens": 4096}}).models[0])
    controller._awake.clear()
    model = controller.models["chat"]
    assert model.rollout is not None
    controller._probing["chat"] = cast(Any, None)
    await controller._probe(model)
    assert not controller._awake.is_set()
    assert controller._probing == {}


def chat(*regions: str, **more: Any) -> dict[str, Any]:
    return {"name": "chat", "replicas": 2, "places": [{"region": one} for one in regions]} | more


async def test_replicas_follow_their_places_and_serve_until_others_do(ruled: Ruled) -> None:
    controller = await ruled.controller(ruled.settings(chat("us")))
    await ruled.serve(controller)
    done = await ruled.roll(controller, ruled.settings(chat("eu")))
    assert done["moving"] == [{"model": "chat", "replicas": 2, "places": ["eu"]}]
    assert shown(controller) == ["eu starting", "us ready", "us ready"]  # surge is 1
    await ruled.serve(controller)
    assert shown(controller) == ["eu ready", "us draining", "us ready"]
    await controller.tick()
    await ruled.serve(controller)
    assert shown(controller) == ["eu ready", "eu ready", "us draining", "us draining"]
    assert controller.keeper.replicas["chat-1"].reason == "it runs outside the places of its model"
    done = await ruled.roll(controller, ruled.settings(chat("eu", "asia")))  # further places move nothing
    assert not any(done.values())
    assert shown(controller) == ["eu ready", "eu ready", "us draining", "us draining"]


class Watched:
    """The control API of a controller whose starting replicas serve after each look at its status."""

    def __init__(self, ruled: Ruled, controller: Controller) -> None:
        self._ruled, self._controller = ruled, controller
        self._commands = Commands(controller, "", lambda: controller.settings, lambda: None)
        self._loop = asyncio.get_running_loop()

    def get(self, path: str) -> Any:
        assert path == "/fleet/status"
        return asyncio.run_coroutine_threadsafe(self._status(), self._loop).result()

    async def _status(self) -> Any:
        status = msgspec.to_builtins(self._commands.status())
        await self._ruled.serve(self._controller)
        await self._controller.tick()
        return status


async def test_roll_wait_waits_until_every_replica_has_moved(
    ruled: Ruled, capsys: pytest.CaptureFixture[str]
) -> None:
    controller = await ruled.controller(ruled.settings(chat("us")))
    await ruled.serve(controller)
    done = await ruled.roll(controller, ruled.settings(chat("eu")))
    code = await asyncio.to_thread(wait_for, cast(Any, Watched(ruled, controller)), done)
    assert [one for one in shown(controller) if "draining" not in one] == ["eu ready", "eu ready"]
    assert (code, capsys.readouterr().out.splitlines()) == (
        0,
        [
            "chat: 2 replicas still move",
            "chat: 1 replicas still move",
            "chat: 2 replicas serve at its places",
        ],
    )


async def test_replicas_that_residency_bars_count_for_nothing(ruled: Ruled) -> None:
    controller = await ruled.controller(ruled.settings(chat("us-east")))
    await ruled.serve(controller)
    await ruled.roll(controller, ruled.settings(chat("eu-west", residency=["eu-*"])))
    assert shown(controller) == ["eu-west starting"] * 2 + ["us-east ready"] * 2
    await ruled.serve(controller)
    assert shown(controller) == ["eu-west ready"] * 2 + ["us-east draining"] * 2


async def test_replicas_without_a_recorded_place_are_replaced_once_residency_is_set(ruled: Ruled) -> None:
    controller = await ruled.controller(ruled.settings({"name": "chat", "replicas": 2}))
    await ruled.serve(controller)
    await ruled.roll(controller, ruled.settings(chat("eu-west", residency=["eu-*"])))
    assert shown(controller) == ["- ready"] * 2 + ["eu-west starting"] * 2


async def test_barred_replicas_leave_first_where_the_budget_has_no_room(ruled: Ruled) -> None:
    controller = await ruled.controller(ruled.settings(chat("us-east"), fleet={"budget": 2}))
    await ruled.serve(controller)
    await ruled.roll(controller, ruled.settings(chat("eu-west", residency=["eu-*"]), fleet={"budget": 2}))
    assert shown(controller) == ["us-east draining"] * 2


async def test_a_rollout_with_new_residency_keeps_the_old_version_serving_there(ruled: Ruled) -> None:
    controller = await ruled.controller(ruled.settings(chat("us-east")))
    await ruled.serve(controller)
    new = chat("eu-west", residency=["eu-*"], serve={"kv_tokens": 4096})
    await ruled.roll(controller, ruled.settings(new))
    await controller.tick()
    assert shown(controller) == ["eu-west starting"] * 2 + ["us-east ready"] * 2
    await ruled.serve(controller)
    assert shown(controller).count("us-east draining") == 2


async def test_latencies_and_the_budget_are_applied_and_other_keys_are_refused(ruled: Ruled) -> None:
    controller = await ruled.controller(ruled.settings(chat("eu")))
    latency = {"eu": {"us": 80.0}}
    done = await ruled.roll(controller, ruled.settings(chat("eu"), latency=latency, fleet={"budget": 3}))
    assert done["applied"] == ["[latency]", "[fleet] budget"]
    assert controller.board.table is not None
    assert controller.board.table.latency_ms == latency
    assert controller.settings.fleet.budget == 3
    for fleet in ({"region": "eu"}, {"drain_s": 3.0}):
        with pytest.raises(CommandRefused, match=rf"^\[fleet\] {next(iter(fleet))} changed: run"):
            await ruled.roll(controller, ruled.settings(chat("eu"), fleet=fleet))


async def test_a_roll_that_one_model_refuses_changes_no_model(ruled: Ruled) -> None:
    tight = {"scaling": {"min": 1, "max": 9, "budget": 1.0}}
    last = {"name": "last"} | tight
    controller = await ruled.controller(ruled.settings({"name": "gone"}, chat("eu"), last))
    old = {name: model.config for name, model in controller.models.items()}
    serve = {"serve": {"kv_tokens": 4096}}
    new = ruled.settings(chat("eu") | serve, {"name": "added"}, last | serve, latency={"eu": {"us": 80.0}})
    with pytest.raises(CommandRefused, match=r"^last: the budget has no room for one more replica"):
        await ruled.roll(controller, new)
    assert {name: model.config for name, model in controller.models.items()} == old
    assert all(model.rollout is None for model in controller.models.values())
    assert controller.settings.latency_ms == {}


async def test_a_controller_starts_though_the_file_cannot_be_rolled_out_yet(ruled: Ruled) -> None:
    first = await ruled.controller(ruled.settings(chat("eu")))
    await ruled.serve(first)
    for one in first.keeper.replicas.values():
        await ruled.store.save_replica(one.stored())
    await ruled.roll(first, ruled.settings(chat("eu", serve={"kv_tokens": 4096})))
    second = await ruled.controller(ruled.settings(chat("eu", serve={"kv_tokens": 8192})))
    assert second.models["chat"].rollout is not None
    assert "fleet.toml is not rolled out: chat: a rollout to" in " ".join(
        event.text for event in second.board.recent
    )


async def test_replicas_of_a_removed_model_cost_until_they_end(ruled: Ruled) -> None:
    fleet = {"budget": 5.0}
    dear = chat("eu", resources={"price": 2.0}) | {"places": []}
    old = ruled.settings({"name": "other"}, dear, fleet=fleet)
    controller = await ruled.controller(old)
    await ruled.serve(controller)
    await ruled.roll(controller, ruled.settings({"name": "other", "replicas": 3}, fleet=fleet))
    assert shown(controller) == ["- draining"] * 2 + ["- ready"]
    assert controller._room(controller.models["other"].config).count == 0
    again = await ruled.controller(ruled.settings({"name": "other"}, fleet=fleet))  # it reads the records
    assert again._room(again.models["other"].config).count == 0


async def test_starts_that_hang_count_in_the_budget_and_hold_up_no_other_model(
    ruled: Ruled, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, asked = ruled.substrate.start, []

    async def hangs(spec: ReplicaSpec) -> Handle:
        asked.append(spec.id)
        return await (asyncio.Event().wait() if spec.model == "slow" else start(spec))  # type: ignore[return-value]

    monkeypatch.setattr(ruled.substrate, "start", hangs)
    models = ({"name": "slow", "replicas": 2}, {"name": "quick", "replicas": 1})
    settings = ruled.settings(*models, fleet={"budget": 3.0})
    controller = Controller(settings, ruled.store, ruled.substrate, cast(Any, None), "key", lambda: ruled.now)
    ruled.made.append(controller)
    await controller.start()
    async with asyncio.timeout(PATIENCE_S):
        while not (of := controller.keeper.of("quick")) or of[0].handle is None:
            await controller.tick()
            await asyncio.sleep(0.01)
    for _ in range(3):
        await controller.tick()
    assert asked == ["slow-1", "slow-2", "quick-1"]
    assert controller._room(controller.models["quick"].config).count == 0


async def test_adopted_replicas_get_the_environment_of_their_start(ruled: Ruled) -> None:
    first = await ruled.controller(ruled.settings({"name": "chat"}, {"name": "gone"}))
    await ruled.serve(first)
    await ruled.controller(ruled.settings({"name": "chat"}))
    started = {one.id: one.environment for one in ruled.substrate.started}
    assert started["chat-1"]["RIDGELINE_API_KEYS"] == "key"
    assert ruled.substrate.adopted == {"chat-1": started["chat-1"], "gone-1": None}


def told(controller: Controller) -> LoadBook:
    """What a router knows after the controller's newest table."""
    book = LoadBook(lambda: 0.0)
    assert controller.board.table is not None
    book.set_table(controller.board.table)
    return book


async def test_an_alias_that_fleet_toml_moves_or_drops_is_no_longer_the_old_model_s(ruled: Ruled) -> None:
    """Replicas still have the names with which they were started: an alias does not belong to a version."""
    controller = await ruled.controller(
        ruled.settings({"name": "new"}, {"name": "old", "aliases": ["best", "first"]})
    )
    await ruled.serve(controller)
    names = {"new": ("new",), "old": ("old", "best", "first")}
    for one in controller.keeper.replicas.values():
        one.hear(Started("e", 1, one.model, names[one.model], "v", 8, 64, 16, {}), ruled.now)
    await ruled.roll(controller, ruled.settings({"name": "new", "aliases": ["best"]}, {"name": "old"}))
    models = told(controller).models
    assert {name: entry.name for name, entry in models.items()} == {"new": "new", "best": "new", "old": "old"}


async def test_loaded_adapters_are_served_and_never_hide_a_name_of_fleet_toml(ruled: Ruled) -> None:
    controller = await ruled.controller(ruled.settings({"name": "a"}, {"name": "b", "aliases": ["ada"]}))
    await ruled.serve(controller)
    (of_a,) = controller.keeper.of("a")
    counts = (0, "ready", *(0,) * 12)
    of_a.hear(Load(*counts, adapters=("ada", "bob")), ruled.now)
    await controller.tick()
    models = told(controller).models
    assert {name: entry.name for name, entry in models.items()} == {
        "a": "a",
        "b": "b",
        "ada": "b",
        "bob": "a",
    }
    of_a.hear(Load(*counts), ruled.now)
    await controller.tick()
    assert "bob" not in told(controller).models


async def test_a_roll_applies_a_changed_scaling_table(ruled: Ruled) -> None:
    plain = {"name": "chat", "replicas": 2}
    controller = await ruled.controller(ruled.settings(plain))
    assert controller.scaler.last == {}
    for most in (3, 4):
        ruled.now += 100.0
        await ruled.roll(controller, ruled.settings(plain | {"scaling": {"max": most}}))
        assert controller.scaler.last["chat"].target == 2
        assert controller.scaler._autoscalers["chat"].config.max == most
    await ruled.roll(controller, ruled.settings(plain))
    assert controller.scaler.last == {}
