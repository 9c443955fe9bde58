"""Course: one accepted request under way, from the engine's first chunk to the account of how it ended.

Both kinds of answer, whole and streamed, take their pieces here. Leaving the course for any reason closes
the engine's generators, which aborts what is unfinished, and books the request exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from ridgeline.engine.client import AsyncClient
from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.output import OutputChunk
from ridgeline.engine.request import SamplingParams
from ridgeline.server.choices import Choices, Piece, Prompt
from ridgeline.server.errors import ClientGone, DeadlineExceeded, SlowReader, reply_to
from ridgeline.server.exchange import Exchange
from ridgeline.server.front import Front, fingerprint
from ridgeline.server.protocol import GenerationRequest
from ridgeline.telemetry.logs import log_request
from ridgeline.telemetry.timing import TimingRecord

Arrival = tuple[int, OutputChunk]  # which prompt, and what came for it


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked of which engine, and how the client wants to see it."""

    client: AsyncClient
    model: str  # the name the client knows it by
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    include_timing: bool = False
    priority: int = 0
    cache_namespace: str = ""

    @classmethod
    def of(
        cls,
        body: GenerationRequest,
        client: AsyncClient,
        model: str,
        prompts: list[Prompt],
        params: SamplingParams,
    ) -> Job:
        return cls(
            client,
            model,
            prompts,
            params,
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            include_timing=bool(body.include_timing),
            priority=body.priority or 0,
            cache_namespace=body.cache_salt or "",
        )

    def head(self, exchange: Exchange, prefix: str) -> dict[str, Any]:
        """What every body of the answer begins with."""
        return {
            "id": f"{prefix}-{exchange.request_id}",
            "created": exchange.created,
            "model": self.model,
            "system_fingerprint": fingerprint(self.client),
        }


class Course:
    def __init__(self, front: Front, exchange: Exchange, job: Job) -> None:
        self.exchange = exchange
        self.job = job
        self.choices = Choices(job.prompts, job.params)
        self._front = front
        self._feed = _Feed([self._source(p) for p in job.prompts], front.config.stream_buffer_chunks)
        limit_s = front.config.request_timeout_s
        self._deadline = None if limit_s is None else exchange.arrival + limit_s

    async def __aenter__(self) -> Course:
        await self._feed.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Booked before the feed is closed: closing waits, and a cancelled wait must not lose the record.
        self._book(error)
        await self._feed.__aexit__(kind, error, trace)

    async def next_pieces(self, patience_s: float | None = None) -> list[Piece] | None:
        """The next pieces, at least one; [] when `patience_s` went by without any; None after the last."""
        while True:
            try:
                async with asyncio.timeout(self._wait_s(patience_s)):
                    batch = await self._feed.batch()
            except TimeoutError:
                self._check_deadline()
                return []
            if not batch:
                self.choices.check_complete()
                return None
            pieces = [piece for arrival in batch for piece in self.choices.pieces(*arrival)]
            if pieces:
                return pieces

    def _source(self, prompt: Prompt) -> AsyncGenerator[OutputChunk, None]:
        chunks = self.job.client.generate(
            prompt.ids,
            self.job.params,
            request_id=self.exchange.request_id,
            arrival=self.exchange.arrival,
            priority=self.job.priority,
            cache_namespace=self.job.cache_namespace,
        )
        return cast(AsyncGenerator[OutputChunk, None], chunks)

    def _wait_s(self, patience_s: float | None) -> float | None:
        if self._deadline is None:
            return patience_s
        left_s = max(0.0, self._deadline - time.monotonic())
        return left_s if patience_s is None else min(left_s, patience_s)

    def _check_deadline(self) -> None:
        limit_s = self._front.config.request_timeout_s
        if self._deadline is not None and limit_s is not None and time.monotonic() >= self._deadline:
            raise DeadlineExceeded(limit_s)

    def _book(self, error: BaseException | None) -> None:
        """Tell metrics and log how every choice ended. What the engine did not accept the gate books."""
        if isinstance(error, InvalidRequest | QueueFull):
            return
        self.exchange.booked = True
        status, failure = _outcome(error)
        if isinstance(error, SlowReader):
            self._front.metrics.stream_cut()
        now = time.monotonic()
        for index in range(self.choices.count):
            timing = self.choices.timings.get(index) or self._unbegun(index)
            if index not in self.choices.finish_reasons:
                timing.end, timing.end_reason = now, failure
            timing.sent = now
            reason = failure or self.choices.finish_reasons[index]
            self._front.metrics.request_finished(timing, self.exchange.path, reason)
            log_request(self.exchange.request_id, self.exchange.path, status, timing, reason)

    def _unbegun(self, index: int) -> TimingRecord:
        prompt = self.job.prompts[index // self.job.params.n]
        return TimingRecord(self.exchange.arrival, prompt_tokens=len(prompt.ids))


def _outcome(error: BaseException | None) -> tuple[int, str]:
    """Status and reason for the log; 499 is what proxies write for a client that left."""
    if error is None:
        return 200, ""
    if isinstance(error, ClientGone | asyncio.CancelledError):
        return 499, "abort"
    if isinstance(error, SlowReader):
        return 499, "slow_reader"
    if isinstance(error, DeadlineExceeded):
        return 504, "timeout"
    reply = reply_to(error)
    return (reply.status if reply else 500), "error"


class _Feed:
    """The chunks of all prompts through one bounded buffer.

    A task per prompt takes chunks from the engine's client; the answer takes whatever is waiting, at once.
    Closing the feed closes every generator, which aborts what still runs in the engine.
    """

    def __init__(self, sources: Sequence[AsyncGenerator[OutputChunk, None]], buffer_chunks: int) -> None:
        self._sources = sources
        self._buffer_chunks = buffer_chunks
        self._waiting: deque[Arrival] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._open = len(sources)
        self._error: Exception | None = None
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> _Feed:
        self._pumps = [asyncio.create_task(self._pump(i, s)) for i, s in enumerate(self._sources)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def batch(self) -> list[Arrival]:
        """Everything that is waiting, at least one chunk; empty once all prompts ended.

        An error of any prompt is raised after the chunks that came before it.
        """
        while not self._waiting and self._open and self._error is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._waiting:
            taken = list(self._waiting)
            self._waiting.clear()
            self._room.set()
            return taken
        if self._error is not None:
            raise self._error
        return []

    async def _pump(self, number: int, source: AsyncGenerator[OutputChunk, None]) -> None:
        try:
            async with aclosing(source):
                async for chunk in source:
                    while len(self._waiting) >= self._buffer_chunks:
                        self._room.clear()
                        await self._room.wait()
                    self._waiting.append((number, chunk))
                    self._arrived.set()
        except Exception as error:
            self._error = self._error or error
        finally:
            self._open -= 1
            self._arrived.set()
