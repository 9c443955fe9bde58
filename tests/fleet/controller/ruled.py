"""A controller on replicas that are records only: no process runs. A test says which of them serve."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ridgeline.fleet.config import FleetSettings, make_fleet
from ridgeline.fleet.config_substrates import LocalConfig
from ridgeline.fleet.controller.api.commands import Commands
from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.substrates.local import LocalSubstrate
from ridgeline.fleet.substrates.substrate import Handle, Observed, ReplicaSpec


class PaperSubstrate(LocalSubstrate):
    """Replicas start at once and never answer."""

    def __init__(self, path: Path, config: LocalConfig | None = None) -> None:
        super().__init__(path, config or LocalConfig())
        self.started: list[ReplicaSpec] = []
        self.adopted: dict[str, Mapping[str, str] | None] = {}

    async def start(self, spec: ReplicaSpec) -> Handle:
        self.started.append(spec)
        return Handle(spec.id, "paper")

    async def adopt(self, handle: Handle, environment: Mapping[str, str] | None) -> None:
        self.adopted[handle.replica] = environment

    async def stop(self, handle: Handle, drain_s: float) -> None:
        return None

    async def poll(self, handle: Handle) -> Observed:
        return Observed("running")

    async def find(self, fleet: str) -> Sequence[Handle]:
        return []


class Ruled:
    """A controller, and the replicas as the test says they are."""

    def __init__(self, path: Path, store: FleetStore) -> None:
        self.path, self.store, self.substrate = path, store, PaperSubstrate(path)
        self.now = 1000.0
        self.made: list[Controller] = []

    def settings(self, *models: dict[str, Any], **document: Any) -> FleetSettings:
        document["fleet"] = {"state_dir": str(self.path)} | document.get("fleet", {})
        return make_fleet({"models": list(models)} | document)

    async def controller(self, settings: FleetSettings) -> Controller:
        made = Controller(settings, self.store, self.substrate, cast(Any, None), "key", lambda: self.now)
        self.made.append(made)
        await made.start()
        await self.turn(made)
        return made

    async def turn(self, controller: Controller) -> None:
        """One turn of the loop. Afterwards the substrate has answered every start."""
        await controller.tick()
        if starts := [one.beginning for one in controller.keeper.replicas.values() if one.beginning]:
            await asyncio.wait(starts)

    async def roll(self, controller: Controller, settings: FleetSettings) -> Any:
        """`fleet roll` of this file, and one turn of the loop."""
        done = await Commands(controller, "", lambda: settings, lambda: None).roll({})
        await self.turn(controller)
        return done

    async def serve(self, controller: Controller) -> None:
        """Every replica that starts serves now."""
        for one in controller.keeper.replicas.values():
            if one.state == "starting":
                one.enter("ready", self.now)
        await self.turn(controller)


def shown(controller: Controller) -> list[str]:
    return sorted(f"{one.region or '-'} {one.state}" for one in controller.keeper.replicas.values())
