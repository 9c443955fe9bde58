"""Several upstreams with a scripted server each, as the tests of retries and fallbacks ask them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.upstreams.config import RetryConfig, UpstreamConfig
from ridgeline.gateway.upstreams.opened import Attempt, Opened
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.gateway.upstreams.upstreams import Upstreams
from tests.patience import PATIENCE_S
from tests.proxy.scripted import (
    Script,
    Scripted,
    scripted,
)

# Waits are short, the breaker is out of the way, the budget is large: each test narrows what it is about.
CALM = {
    "backoff_ms": 2.0,
    "backoff_max_ms": 20.0,
    "budget_ratio": 1.0,
    "budget_per_s": 1000.0,
    "breaker_failures": 1000,
}


class Clock:
    """The real one, set forward by a test instead of waiting."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Gateway:
    """Upstreams a, b, … each with its scripted server."""

    def __init__(self, upstreams: Upstreams, servers: Sequence[Scripted], names: str, clock: Clock) -> None:
        self.upstreams, self.servers, self.names, self.clock = upstreams, servers, names, clock
        self.attempts: list[Attempt] = []

    async def open(self, names: str | None = None, **options: Any) -> Opened:
        stream = options.pop("stream", False)
        outgoing = Outgoing("POST", "/v1/chat/completions", [(b"x-request-id", b"r1")], b"{}", stream)
        options.setdefault("deadline", self.clock() + PATIENCE_S)
        options.setdefault("prepare", lambda target: outgoing)
        self.attempts = []
        return await self.upstreams.open(
            [Target(name, "m") for name in names or self.names],
            options.pop("prepare"),
            tenant="t",
            attempts=self.attempts,
            **options,
        )

    async def body(self, names: str | None = None, **options: Any) -> bytes:
        opened = await self.open(names, **options)
        body = opened.first + await opened.read(1 << 20)
        opened.close(True)
        return body

    async def error(self, names: str | None = None, **options: Any) -> GatewayError:
        with pytest.raises(GatewayError) as failure:
            await self.open(names, **options)
        return failure.value

    @property
    def causes(self) -> list[str]:
        return [attempt.cause for attempt in self.attempts]

    @property
    def kinds(self) -> list[str]:
        return [attempt.kind for attempt in self.attempts]

    def state(self, name: str = "a") -> Any:
        return next(state for state in self.upstreams.snapshot() if state.name == name)

    async def at_rest(self) -> None:
        """No place is held, no connection is open but kept ones."""
        assert self.is_at_rest

    @property
    def is_at_rest(self) -> bool:
        held = [(state.inflight, state.waiting) for state in self.upstreams.snapshot()]
        return held == [(0, 0)] * len(self.names) and not self.upstreams._client.pool.live


@contextlib.asynccontextmanager
async def gateway(
    *scripts: Sequence[Script], retries: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Gateway]:
    """A list of scripts for each upstream: a, b, …"""
    names = "abcd"[: len(scripts)]
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(scripted(*each)) for each in scripts]
        configs = [
            UpstreamConfig(**{"name": name, "url": server.url, "first_byte_timeout_s": PATIENCE_S, **config})
            for name, server in zip(names, servers, strict=True)
        ]
        clock = Clock()
        upstreams = Upstreams(configs, RetryConfig(**{**CALM, **(retries or {})}), clock=clock)
        yield Gateway(upstreams, servers, names, clock)
        await upstreams.stop()
