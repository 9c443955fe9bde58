"""The figures of the console's Live page: counters and gauges of each engine, and its latest steps.

The page computes rates from the counters of two frames, so each figure is the metric that its formula names.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_right
from typing import Any

import msgspec

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.errors import EngineDied
from ridgeline.server.served_models import Model, ServedModels
from ridgeline.telemetry.stats import EngineStats, StepRecord

STEPS_TIMEOUT_S = 0.5  # a step that takes longer is counted in the next frame
# Upper edges of the step-time histogram, in ms; the last bucket has no edge.
STEP_EDGES_MS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000)


class StepSums(msgspec.Struct, omit_defaults=True):
    """Of the steps since the last frame."""

    count: int = 0
    busy_s: float = 0.0
    decode_rows: int = 0  # Σ decode batch
    prefill_tokens: int = 0
    times: dict[int, int] = {}  # bucket of STEP_EDGES_MS → steps


class ModelFrame(msgspec.Struct, omit_defaults=True):
    name: str
    ready: bool
    reason: str = ""
    running: int = 0
    waiting: int = 0
    background: int = 0
    held: int = 0  # KV blocks
    cached: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_evicted: int = 0
    preemptions: int = 0
    steps: int = 0
    recent: StepSums | None = None  # None: the engine did not answer in time


class LiveFigures:
    """The topic `metrics`."""

    def __init__(self, served_models: ServedModels) -> None:
        self._models = served_models.models
        self._last_step: dict[str, tuple[AsyncClient, int]] = {}
        self._steps_seen: dict[str, int] = {}
        self._steps_read: dict[str, int] = {}  # the count when the engine's records were read

    def snapshot(self) -> dict[str, Any]:
        return {"edges_ms": STEP_EDGES_MS, "models": [self._about(model) for model in self._models]}

    async def frame(self) -> dict[str, Any]:
        frames = await asyncio.gather(*(self._frame(model) for model in self._models))
        return {"at": round(time.time(), 3), "models": frames}

    def _about(self, model: Model) -> dict[str, Any]:
        client = model.engine.client
        if client is None:
            return {"name": model.names[0]}
        hello = client.hello
        return {
            "name": model.names[0],
            "task": hello.task,
            "backend": hello.backend,
            "context": hello.max_context,
            "max_running": hello.max_running,
            "block_size": hello.block_size,
            "kv_blocks": hello.kv_tokens // hello.block_size if hello.block_size else 0,
            "limits": hello.limits,
        }

    async def _frame(self, model: Model) -> ModelFrame:
        client, (ready, reason) = model.engine.client, model.engine.ready()
        is_up = client is not None and not client.closed.is_set()
        stats = client.stats if client is not None else EngineStats()
        frame = ModelFrame(model.names[0], ready, "" if ready else reason)
        if client is not None and is_up:
            if (stats.running or stats.waiting) and stats.steps == self._steps_seen.get(model.names[0]):
                stats = await self._asked(client)  # no step told of its end
            self._steps_seen[model.names[0]] = stats.steps
            frame.running, frame.waiting = stats.running, stats.waiting
            frame.background = stats.waiting_background
            frame.held, frame.cached = stats.kv_blocks_held, stats.kv_blocks_cached
            frame.recent = await self._recent(model.names[0], client)
        for field in (
            "prompt_tokens",
            "output_tokens",
            "prefix_queries",
            "prefix_hits",
            "prefix_evicted",
            "preemptions",
            "steps",
        ):
            setattr(frame, field, getattr(stats, field))
        return frame

    async def _asked(self, client: AsyncClient) -> EngineStats:
        with contextlib.suppress(TimeoutError, EngineDied):
            async with asyncio.timeout(STEPS_TIMEOUT_S):
                await client.ping()
        return client.stats

    async def _recent(self, name: str, client: AsyncClient) -> StepSums | None:
        if client.hello.task != "generate":
            return None
        known = self._last_step.get(name)
        since = known[1] if known is not None and known[0] is client else None
        steps = client.stats.steps
        if since is not None and steps == self._steps_read.get(name):
            return StepSums()  # an idle engine is not asked
        try:
            async with asyncio.timeout(STEPS_TIMEOUT_S):
                # Without a last step, only the number of the newest is wanted: a ring has thousands.
                records = await client.dump_steps(-1 if since is None else since)
        except (TimeoutError, EngineDied):
            return None
        self._steps_read[name] = steps
        if records:
            self._last_step[name] = (client, records[-1].step_id)
        elif since is None:
            self._last_step[name] = (client, -1)
        return summed([] if since is None else records)


def summed(records: list[StepRecord]) -> StepSums:
    sums = StepSums(count=len(records), times={})
    for record in records:
        sums.busy_s += record.busy_s
        sums.decode_rows += record.decode_batch
        sums.prefill_tokens += record.prefill_tokens
        bucket = bisect_right(STEP_EDGES_MS, record.wall_s * 1000)
        sums.times[bucket] = sums.times.get(bucket, 0) + 1
    sums.busy_s = round(sums.busy_s, 4)
    return sums
