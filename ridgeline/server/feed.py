"""Feed: the chunks of one HTTP request, from all its prompts, through one bounded buffer.

A task per prompt takes chunks from the engine's client; the answer takes whatever is waiting, at once.
Closing the feed closes every generator, which aborts what still runs in the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType

from ridgeline.engine.output import OutputChunk

Arrival = tuple[int, OutputChunk]  # which prompt, and what came for it


class Feed:
    def __init__(self, sources: Sequence[AsyncGenerator[OutputChunk, None]], buffer_chunks: int) -> None:
        self._sources = sources
        self._buffer_chunks = buffer_chunks
        self._waiting: deque[Arrival] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._open = len(sources)
        self._error: Exception | None = None
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Feed:
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
