"""A router in the test's own loop, with a controller's socket and replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.fleet.messages import ModelEntry
from ridgeline.fleet.router.config import FleetTuning
from ridgeline.fleet.router.fleet_router import FleetRouter
from ridgeline.fleet.router.process import control_origin
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.proxy.json_fields import read_fields
from tests.fleet.router.controller_socket import ControllerSocket
from tests.fleet.router.scripted_replica import MODEL, ScriptedReplica
from tests.patience import PATIENCE_S
from tests.ports import free_port


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {PATIENCE_S:g} s"
        await asyncio.sleep(0.005)


@dataclass
class Stage:
    """A controller, replicas and routers."""

    controller: ControllerSocket
    replicas: list[ScriptedReplica] = field(default_factory=list)
    routers: list[FleetRouter] = field(default_factory=list)

    async def add(self, count: int = 1, **options: Any) -> list[ScriptedReplica]:
        names = [f"r{len(self.replicas) + n}" for n in range(count)]
        # Not any port: one that dies may come back on it, and no other program gets it meanwhile.
        made = [await ScriptedReplica(name, **options).start(free_port()) for name in names]
        self.replicas += made
        self.publish()
        return made

    def publish(self, *gone: ScriptedReplica) -> None:
        self.controller.set(*(one.entry() for one in self.replicas if one not in gone))

    async def router(self, region: str = "", **tuning: Any) -> FleetRouter:
        origin = control_origin(self.controller.path)
        router = FleetRouter(origin, tuning=FleetTuning(**tuning), region=region)
        self.routers.append(router)
        router.start()
        await until(lambda: router.has_table, "a table")
        await until(
            lambda: all(one.load is not None for one in router.replicas.values()), "a load of each replica"
        )
        return router

    async def heard(self, router: FleetRouter) -> None:
        """Until the router knows every replica."""
        await until(lambda: len(router.replicas) == len(self.replicas), "every replica")
        await until(lambda: all(one.load for one in router.replicas.values()), "a load of each replica")


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    model = ModelEntry(MODEL, aliases=("alias", "outer"), max_held=4, hold_s=PATIENCE_S, cold_s=PATIENCE_S)
    controller = await ControllerSocket(tmp_path / "controller.sock", model).start()
    made = Stage(controller)
    yield made
    for router in made.routers:
        await router.stop()
    for replica in made.replicas:
        await replica.stop()
    await controller.stop()


def request(stream: bool = False, path: str = "/v1/chat/completions", **changes: Any) -> FleetRequest:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "count"}], "stream": stream}
    fields |= changes.pop("fields", {})
    body = msgspec.json.encode(fields)
    headers = [(b"content-type", b"application/json")]
    return FleetRequest(
        "POST", path, headers, body, fields["model"], read_fields(body), stream=stream, **changes
    )


async def ask(router: FleetRouter, asked: FleetRequest) -> bytes:
    answer = await router.ask(asked)
    return await answer.read(1 << 20)


def counted(tokens: int) -> bytes:
    """The text of an undisturbed stream."""
    events = b"".join(b'data: {"token":%d}\n\n' % token for token in range(tokens))
    return events + b"data: [DONE]\n\n"
