"""Streams of every kind through a fleet, read as a client reads them."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.fleet.controller.live_fleet import LiveFleet
from tests.patience import PATIENCE_S

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "level": {"type": "integer", "maximum": 99}},
    "required": ["city", "level"],
    "additionalProperties": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.9, "seed": 11, "n": 2},
    {
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "r", "schema": SCHEMA, "strict": True},
        },
    },
    {"temperature": 0, "stop": ["the end", "###"], "frequency_penalty": 0.3},
)


@dataclass
class Stream:
    """What one client got."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[str] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    errors: list[Any] = field(default_factory=list)
    done: bool = False

    def told(self) -> tuple[object, ...]:
        """All that must not depend on the replica that answered."""
        tokens = {name: self.usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
        return self.texts, self.logprobs, self.reasons, tokens

    def read(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.ids.add(event["id"])
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + (choice["delta"].get("content") or "")
            if choice.get("logprobs"):
                self.logprobs += [one["token"] for one in choice["logprobs"]["content"]]
            if choice["finish_reason"]:
                self.reasons[index] = choice["finish_reason"]


async def stream(session: aiohttp.ClientSession, url: str, number: int, max_tokens: int) -> Stream:
    got = Stream()
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": f"Tell a long story about the number {number}."}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **KINDS[number % len(KINDS)],
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            got.errors.append(await answer.text())
            return got
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                got.done = True
            elif line.startswith(b"data: "):
                got.read(json.loads(line[6:]))
    return got


async def streams(
    url: str, count: int, max_tokens: int, disturb: Callable[[], None] | None = None, secret: str = ""
) -> list[Stream]:
    """`count` streams at once; `disturb` is called when some of them have begun. secret: a gateway's key."""
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    limits = aiohttp.ClientTimeout(total=5 * PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limits, connector=connector, headers=headers) as session:
        tasks = [asyncio.create_task(stream(session, url, number, max_tokens)) for number in range(count)]
        if disturb is not None:
            await asyncio.sleep(1.5)
            disturb()
        return await asyncio.gather(*tasks)


def at_rest(fleet: LiveFleet) -> bool:
    """No request and no KV block is left anywhere in the fleet, and the routers' counts agree."""
    serving = fleet.replicas("ramping", "ready")
    if any(one["running"] + one["waiting"] + one["kv_blocks_held"] for one in serving):
        return False
    with urllib.request.urlopen(f"{fleet.url}/metrics", timeout=PATIENCE_S) as answer:
        return counts_agree(answer.read().decode())


def counts_agree(page: str) -> bool:
    """Whether a router's metrics show as many ended requests as arrived ones, and none between."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            name = sample.partition("{")[0].removeprefix("ridgeline_fleet_")
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums["arrived_total"] == sums["requests_total"] and not sums["in_flight"] + sums["held"]
