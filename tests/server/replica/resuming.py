"""Cuts marked streams and continues them, on a second server over the same real engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx

from ridgeline.engine.client.client import AsyncClient
from ridgeline.replica.resume import (
    RESUMABLE_HEADER,
    RESUME_HEADER,
    Group,
    GroupReader,
    ResumeState,
    with_state,
)
from ridgeline.server.app import app_over
from ridgeline.server.config import ServerConfig
from ridgeline.server.served_models import Model, ServedModels
from ridgeline.telemetry.metrics import ServerMetrics
from tests.patience import PATIENCE_S
from tests.server.scripted_client import ScriptedSupervisor

MARKED = {RESUMABLE_HEADER: "1", "content-type": "application/json"}
CONTINUED = {**MARKED, RESUME_HEADER: "1"}


def server_over(client: AsyncClient, **settings: Any) -> httpx.AsyncClient:
    """A separate server over this engine."""
    model = Model(("m",), ScriptedSupervisor(client), ServerMetrics("m"))  # type: ignore[arg-type]
    return over(ServedModels(ServerConfig(**settings), [model], None))


def over(served_models: ServedModels) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_over(served_models))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE_S)


@dataclass
class Marked:
    """A stream with its markers."""

    groups: list[Group]

    @property
    def events(self) -> bytes:
        return b"".join(group.events for group in self.groups)

    def state(self, groups: int) -> ResumeState:
        state = ResumeState()
        for group in self.groups[:groups]:
            state.add(group.marker)
        return state


async def marked(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Marked:
    answer = await http.post(path, json=body, headers=MARKED)
    assert answer.status_code == 200, answer.text
    assert answer.headers[RESUMABLE_HEADER] == "1"
    return Marked(read(answer.content))


async def continued(http: httpx.AsyncClient, path: str, content: bytes, state: ResumeState) -> Marked:
    answer = await http.post(path, content=with_state(content, state), headers=CONTINUED)
    assert answer.status_code == 200, answer.text
    return Marked(read(answer.content))


def read(content: bytes) -> list[Group]:
    reader = GroupReader()
    groups = reader.feed(content)
    assert reader.incomplete_bytes == 0
    assert groups[-1].marker.end
    return groups


def comparable(events: bytes) -> dict[bytes, list[bytes]]:
    """The events of each choice in order, without what no two streams share: random ids of calls,
    keepalives, and the order in which choices take turns.
    """
    if events.startswith(b"{"):
        return {b"": _ollama_lines(events)}
    by_choice: dict[bytes, list[bytes]] = {}
    for event in re.sub(rb'call_[0-9a-f]{24}|"completed_at":\d+', b"", events).split(b"\n\n"):
        if event.startswith(b":"):
            continue  # a keepalive
        choice = re.search(rb'"choices":\[\{"index":(\d+)', event)
        by_choice.setdefault(choice[1] if choice else b"", []).append(event)
    return by_choice


def _ollama_lines(lines: bytes) -> list[bytes]:
    """Without times, and without keepalives: lines that say nothing."""
    plain = re.sub(rb'"created_at":"[^"]*",|"(total|eval|prompt_eval)_duration":\d+,?', b"", lines)
    empty = re.compile(rb'"(content|response)":""(?!.*"(tool_calls|done_reason)")')
    return [line for line in plain.split(b"\n") if not empty.search(line)]


def cuts(stream: Marked) -> list[int]:
    """After the first tokens, near both ends, in the middle, and before the last events.

    A slow engine's stream begins with a group without tokens; a peer then reports its own cached tokens.
    """
    first = next(place for place, group in enumerate(stream.groups, start=1) if group.marker.cached)
    last = len(stream.groups) - 1
    return sorted({max(first, place) for place in (1, 2, last // 3, last // 2, last - 1, last)})
