"""Commands: what people and routers may ask of the controller. Each checks its input and says what it did."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ridgeline.fleet.config import FleetSettings, serve_options
from ridgeline.fleet.config_models import FleetModel
from ridgeline.fleet.controller.api.metrics import metrics_text
from ridgeline.fleet.controller.api.status import FleetStatus, model_status, replica_status
from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.controller.managed_model import RollRefused
from ridgeline.fleet.messages import Demand
from ridgeline.options import OptionError, check_values

FIXED = ("host", "port", "grpc_port", "routers", "state_dir", "control_host", "control_port")


class CommandRefused(Exception):
    """The message says why, and what to do."""


class Commands:
    """
    reread: reads fleet.toml again
    stop:   ends the fleet; the argument: seconds to drain, None for the file's
    """

    def __init__(
        self,
        controller: Controller,
        url: str,
        reread: Callable[[], FleetSettings],
        stop: Callable[[], None],
    ) -> None:
        self._controller, self._url, self._reread, self._stop = controller, url, reread, stop
        self._began = time.monotonic()
        self.board, self.store = controller.board, controller.store

    def hear(self, demand: Demand) -> None:
        self._controller.hear(demand)

    def metrics(self) -> str:
        return metrics_text(self.status())

    def status(self) -> FleetStatus:
        controller, now = self._controller, self._controller.clock()
        table = controller.board.table
        return FleetStatus(
            fleet=controller.fleet,
            url=self._url,
            pid=os.getpid(),
            up_s=time.monotonic() - self._began,
            fence=controller.store.lease.fence,
            generation=0 if table is None else table.generation,
            stopping=controller.is_stopping,
            routers=controller.settings.fleet.routers,
            routers_reporting=sum(now - at < 5.0 for at, _ in controller.routers_seen.values()),
            models=tuple(model_status(controller, model) for model in controller.models.values()),
            replicas=tuple(replica_status(one, now) for one in controller.keeper.replicas.values()),
        )

    async def logs(self, id: str, last_bytes: int) -> bytes:
        replica = self._controller.keeper.replicas.get(id)
        if replica is None or replica.handle is None:
            known = ", ".join(self._controller.keeper.replicas) or "none"
            raise CommandRefused(f"no replica {id!r} runs; known: {known}")
        return await self._controller.substrate.logs(replica.handle, last_bytes)

    async def scale(self, asked: Mapping[str, Any]) -> Any:
        model = self._model(asked.get("model"))
        count = asked.get("replicas")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise CommandRefused(f"replicas must be a whole number from 0, not {count!r}")
        low, high = (model.scaling.min if model.scales else 0), model.most
        if not low <= count <= high:
            raise CommandRefused(
                f"{model.name}: {count} replicas are outside what fleet.toml allows, {low} to {high}"
            )
        budget = self._controller.settings.fleet.budget
        others = sum(
            one.state.target * one.config.resources.price
            for name, one in self._controller.models.items()
            if name != model.name
        )
        cost = others + count * model.resources.price
        if budget is not None and cost > budget + 1e-9:
            raise CommandRefused(f"all replicas would cost {cost:g} per hour; [fleet] budget is {budget:g}")
        before = self._controller.models[model.name].state.target
        await self._controller.set_target(model.name, count, "asked for by a command")
        note = "the autoscaler may change it again" if model.scales else ""
        return {"model": model.name, "before": before, "replicas": count, "note": note}

    async def roll(self, asked: Mapping[str, Any]) -> Any:
        """set: other options of `ridgeline serve`; back: end the rollout under way. Else read the file."""
        if asked.get("back"):
            return await self._roll_back(asked)
        if asked.get("set"):
            model = self._model(asked.get("model"))
            return {"rolling": [await self._roll_one(with_options(model, asked["set"]))]}
        try:
            settings = self._reread()
        except OptionError as error:
            raise CommandRefused(str(error)) from None
        self._check_fixed(settings)
        wanted = [self._model(asked["model"]).name] if asked.get("model") else list(self._controller.models)
        rolling = []
        for config in settings.models:
            if config.name in wanted:
                if config.version == self._controller.models[config.name].state.current.version:
                    await self._controller.reconfigure(config)  # what needs no new replicas
                    continue
                rolling.append(await self._roll_one(config))
        return {"rolling": rolling}

    async def drain(self, asked: Mapping[str, Any]) -> Any:
        """Drain one replica. Another one takes its place where it is still wanted."""
        replica = self._controller.keeper.replicas.get(str(asked.get("replica")))
        if replica is None or not replica.is_alive:
            known = [one.id for one in self._controller.keeper.replicas.values() if one.is_alive]
            raise CommandRefused(
                f"no replica {asked.get('replica')!r} can be drained; known: {', '.join(known) or 'none'}"
            )
        await self._controller.keeper.drain(replica, "asked for by a command")
        self._controller.wake()
        return {"replica": replica.id, "drain_s": self._controller.settings.fleet.drain_s}

    async def down(self, asked: Mapping[str, Any]) -> Any:
        asyncio.get_running_loop().call_later(0.05, self._stop)  # after this answer
        return {"stopping": True, "drain_s": self._controller.settings.fleet.drain_s}

    # ---- parts ----

    def _model(self, name: Any) -> FleetModel:
        models = self._controller.models
        if not name and len(models) == 1:
            return next(iter(models.values())).config
        found = next((one.config for one in models.values() if name in one.config.names), None)
        if found is None:
            raise CommandRefused(f"no model {name!r}; known: {', '.join(models)}")
        return found

    async def _roll_one(self, config: FleetModel) -> dict[str, str]:
        before = self._controller.models[config.name].state.current.version
        try:
            await self._controller.reconfigure(config)
        except RollRefused as error:
            raise CommandRefused(str(error)) from None
        return {"model": config.name, "from": before, "to": config.version}

    async def _roll_back(self, asked: Mapping[str, Any]) -> Any:
        model = self._controller.models[self._model(asked.get("model")).name]
        if model.rollout is None:
            raise CommandRefused(f"{model.config.name}: no rollout is under way")
        model.rollout.turn_back("asked for by a command")
        self._controller.wake()
        return {"rolling": [{"model": model.config.name, "from": model.rollout.new, "to": model.rollout.old}]}

    def _check_fixed(self, settings: FleetSettings) -> None:
        old = self._controller.settings
        changed = [name for name in FIXED if getattr(settings.fleet, name) != getattr(old.fleet, name)]
        if changed or settings.substrate != old.substrate:
            what = ", ".join(f"[fleet] {name}" for name in changed) or "[substrate]"
            raise CommandRefused(f"{what} changed: that needs `ridgeline fleet down` and `fleet up`")
        new = {one.name for one in settings.models} ^ set(self._controller.models)
        if new:
            raise CommandRefused(
                f"models were added or removed ({', '.join(sorted(new))}): stop the controller and start it "
                "again; replicas of other models go on"
            )


def with_options(model: FleetModel, given: Any) -> FleetModel:
    """The model with other options of `ridgeline serve`; source is one of them."""
    if not isinstance(given, dict):
        raise CommandRefused("set must be an object of options")
    given = dict(given)
    try:
        source = check_values(type(model.model), {"source": given.pop("source", model.model.source)})
        serve = {**model.serve, **serve_options(given)}
    except OptionError as error:
        raise CommandRefused(str(error)) from None
    return replace(model, model=replace(model.model, **source), serve=serve)
