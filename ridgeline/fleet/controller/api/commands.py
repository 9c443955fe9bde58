"""Commands: the operations of the control API. Each checks its input and returns what it did."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from ridgeline.fleet.config import FleetConfig, FleetSettings, serve_options
from ridgeline.fleet.config_models import FleetModel
from ridgeline.fleet.controller.api.metrics import metrics_text
from ridgeline.fleet.controller.api.status import FleetStatus, model_status, replica_status
from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.controller.managed_model import RollRefused
from ridgeline.fleet.messages import Demand
from ridgeline.options import OptionError, check_values

FIXED = tuple(one.name for one in fields(FleetConfig) if one.name != "budget")  # [fleet], while it runs


class CommandRefused(Exception):
    """The controller refused a command. The message says why, and what to do."""


class Commands:
    """
    reread: reads fleet.toml again
    stop:   ends the fleet; its argument is the seconds to drain, None for drain_s of the file
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
        self.decisions = controller.decisions

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
            capacity=controller.supply.capacity,
            reserved=controller.supply.reserved(controller.keeper.replicas.values()),
        )

    async def logs(self, id: str, last_bytes: int) -> bytes:
        replica = self._controller.keeper.replicas.get(id)
        if replica is None or replica.handle is None:
            known = ", ".join(self._controller.keeper.replicas) or "none"
            raise CommandRefused(f"no replica {id!r} is running; known: {known}")
        return await self._controller.substrate.logs(replica.handle, last_bytes)

    async def scale(self, asked: Mapping[str, Any]) -> Any:
        model = self._model(asked.get("model"))
        count = asked.get("replicas")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise CommandRefused(f"replicas must be a whole number of 0 or more, not {count!r}")
        low, high = (model.scaling.min if model.scales else 0), model.most
        if not low <= count <= high:
            raise CommandRefused(
                f"{model.name}: {count} replicas are not allowed: fleet.toml allows {low} to {high}"
            )
        budget = self._controller.settings.fleet.budget
        others = sum(
            one.state.target * one.config.resources.price
            for name, one in self._controller.models.items()
            if name != model.name
        )
        cost = others + count * model.resources.price
        if budget is not None and cost > budget + 1e-9:
            raise CommandRefused(
                f"all replicas would cost {cost:g} per hour, more than [fleet] budget ({budget:g})"
            )
        before = self._controller.models[model.name].state.target
        await self._controller.set_target(model.name, count, "asked for by a command")
        note = "the autoscaler may change it again" if model.scales else ""
        return {"model": model.name, "before": before, "replicas": count, "note": note}

    async def roll(self, asked: Mapping[str, Any]) -> Any:
        """Roll out fleet.toml, or the options in `set`; `back` turns the current rollout back."""
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
        self._check_rolls(settings, self._model(asked["model"]).name if asked.get("model") else "")
        added, removed = await self._change_models(settings) if not asked.get("model") else ([], [])
        wanted = [self._model(asked["model"]).name] if asked.get("model") else list(self._controller.models)
        rolling = []
        for config in settings.models:
            if config.name in wanted and config.name not in added:
                if config.version == self._controller.models[config.name].state.current.version:
                    await self._controller.reconfigure(config)  # settings that need no new replicas
                    continue
                rolling.append(await self._roll_one(config))
        applied = self._apply(settings)
        moving = [one for name in wanted if (one := self._moving(name))["replicas"]]
        return {"rolling": rolling, "added": added, "removed": removed, "moving": moving, "applied": applied}

    async def drain(self, asked: Mapping[str, Any]) -> Any:
        """Drain one replica. The controller starts another one if the target needs it."""
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

    def _check_rolls(self, settings: FleetSettings, only: str) -> None:
        """Before anything is applied: each model may take the settings of the file. only: empty for all."""
        for config in settings.models:
            model = self._controller.models.get(config.name)
            if model is None or only not in ("", config.name):
                continue
            if config.version != model.state.current.version and not model.is_rolling_to(config.version):
                try:
                    self._controller.check_roll(config)
                except RollRefused as error:
                    raise CommandRefused(str(error)) from None

    async def _change_models(self, settings: FleetSettings) -> tuple[list[str], list[str]]:
        """Names of the models that the file has in addition, and of those it no longer has."""
        controller = self._controller
        added = [one for one in settings.models if one.name not in controller.models]
        removed = sorted(controller.models.keys() - {one.name for one in settings.models})
        for name in removed:
            await controller.remove(name)
        for config in added:
            await controller.add(config)
        return [one.name for one in added], removed

    async def _roll_one(self, config: FleetModel) -> dict[str, str]:
        before = self._controller.models[config.name].state.current.version
        try:
            await self._controller.reconfigure(config)
        except RollRefused as error:
            raise CommandRefused(str(error)) from None
        return {"model": config.name, "from": before, "to": config.version}

    def _apply(self, settings: FleetSettings) -> list[str]:
        """Tables and keys that change without a rollout, apart from those of models."""
        old = self._controller.settings
        changed = ["[latency]"] * (settings.latency_ms != old.latency_ms)
        changed += ["[fleet] budget"] * (settings.fleet.budget != old.fleet.budget)
        fleet = replace(old.fleet, budget=settings.fleet.budget)
        self._controller.settings = replace(old, fleet=fleet, latency_ms=settings.latency_ms)
        self._controller.wake()
        return changed

    def _moving(self, name: str) -> dict[str, Any]:
        """How many replicas are outside the places of their model."""
        model = self._controller.models[name]
        away = model.misplaced([one.view() for one in self._controller.keeper.of(name)])
        places = [" ".join(filter(None, place.key)) for place in model.config.spread]
        return {"model": name, "replicas": len(away), "places": places}

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
        substrates = [(one.substrate, one.substrate_options) for one in (settings, old)]
        if changed or substrates[0] != substrates[1]:
            what = ", ".join(f"[fleet] {name}" for name in changed) or "[substrate]"
            raise CommandRefused(f"{what} changed: run `ridgeline fleet down`, then `ridgeline fleet up`")


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
