"""OpenLoad: streamed requests at random times and a fixed rate until told to stop, with their replicas.

For runs whose length is not known before, such as a rollout. `ridgeline bench` measures the others. The time
to first token counts from the moment at which a request was due.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp

WORDS = ("river", "stone", "lamp", "garden", "music", "paper", "cloud", "bread", "winter", "engine", "story")


@dataclass
class Answer:
    """Times are monotonic seconds."""

    due: float
    first: float | None = None
    end: float = 0.0
    tokens: int = 0
    replica: str = ""
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        assert self.first is not None
        return 1000 * (self.first - self.due)


class OpenLoad:
    def __init__(self, url: str, model: str, rate: float, words: int, output_tokens: int, seed: int) -> None:
        self._url, self._model, self._rate = url, model, rate
        self._words, self._output_tokens, self._rng = words, output_tokens, random.Random(seed)
        self.answers: list[Answer] = []

    def between(self, begin: float, end: float) -> list[Answer]:
        """Those that were due then."""
        return [one for one in self.answers if begin <= one.due < end]

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Until cancelled; requests in flight are then awaited."""
        asking: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        try:
            while True:
                due += self._rng.expovariate(self._rate)
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
                task = asyncio.create_task(self._ask(session, Answer(due)))
                asking.add(task)
                task.add_done_callback(asking.discard)
        except asyncio.CancelledError:
            await asyncio.gather(*asking)

    async def _ask(self, session: aiohttp.ClientSession, answer: Answer) -> None:
        self.answers.append(answer)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": " ".join(self._rng.choices(WORDS, k=self._words))}],
            "max_tokens": self._output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with session.post(f"{self._url}/v1/chat/completions", json=body) as got:
                answer.replica = got.headers.get("x-ridgeline-replica", "")
                await _read(got, answer)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            answer.error = repr(error)
        answer.end = time.monotonic()


async def _read(got: aiohttp.ClientResponse, answer: Answer) -> None:
    if got.status != 200:
        answer.error = f"HTTP {got.status}: {(await got.text())[:300]}"
        return
    is_done = False
    async for line in got.content:
        if line.startswith(b"data: [DONE]"):
            is_done = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = str(event["error"])
            if answer.first is None and any(one["delta"].get("content") for one in event.get("choices", ())):
                answer.first = time.monotonic()
            answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
    if not answer.error and not (is_done and answer.first is not None):
        answer.error = "the stream ended before its answer"


@contextlib.asynccontextmanager
async def running(load: OpenLoad) -> AsyncIterator[OpenLoad]:
    limits = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
        task = asyncio.create_task(load.run(session))
        try:
            yield load
        finally:
            task.cancel()
            await task
