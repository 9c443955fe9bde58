"""EventHub: the console's one event stream: topics with a snapshot, changes from which a reader may resume,
and a frame each second.

Without readers nothing is computed or kept beyond the last LINGER_S. With many readers each frame is encoded
once. A reader that reads too slowly gets a new snapshot instead of a growing queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec

log = logging.getLogger(__name__)

FRAME_S = 1.0
CHANGES_S = 0.25  # changes are collected for this long: one event for many requests
KEPT_EVENTS = 512
LINGER_S = 60.0  # changes are kept this long for a reader that reconnects
_encode = msgspec.json.Encoder(decimal_format="number").encode


@dataclass(frozen=True, slots=True)
class Topic:
    """One subject of the stream.

    snapshot: the state that a new reader begins with
    changes:  what changed since the last call; None: nothing. Called every CHANGES_S
    frame:    the figures of this second, which replace the last; None: none. Called every FRAME_S
    """

    snapshot: Callable[[], Any]
    changes: Callable[[], Any | None] | None = None
    frame: Callable[[], Awaitable[Any | None]] | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    seq: int
    topic: str
    data: bytes


class EventHub:
    def __init__(self, topics: dict[str, Topic], is_stopping: Callable[[], bool] = lambda: False) -> None:
        self.topics = topics
        self._is_stopping = is_stopping
        self._epoch = secrets.token_hex(4)
        self._seq = 0
        self._changes: deque[_Change] = deque(maxlen=KEPT_EVENTS)
        self._frames: dict[str, tuple[int, bytes]] = {}
        self._frame_number = 0
        self._woken = asyncio.Event()  # replaced at every change
        self._readers = 0
        self._left_at = float("-inf")
        self._working: asyncio.Task[None] | None = None

    @property
    def readers(self) -> int:
        return self._readers

    async def stream(self, topics: Collection[str], last_id: str = "") -> AsyncIterator[bytes]:
        """One reader's events, as bytes of text/event-stream, until the host stops."""
        self._readers += 1
        try:
            self._begin()
            seen = self._resumed(last_id)
            if seen is None:
                self._collect()  # changes before now are part of the snapshot
                seen = self._seq
                yield b"".join(self._snapshots(topics, "snapshot"))
            else:
                yield b": resumed\n\n"
            shown = 0
            while not self._is_stopping():
                parts, seen, shown = self._after(topics, seen, shown)
                if parts:
                    yield b"".join(parts)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FRAME_S):
                        await self._woken.wait()
        finally:
            self._readers -= 1
            self._left_at = time.monotonic()

    def _after(self, topics: Collection[str], seen: int, shown: int) -> tuple[list[bytes], int, int]:
        parts: list[bytes] = []
        if seen < self._seq:
            if self._seq - len(self._changes) > seen:  # too slow for the log
                parts += self._snapshots(topics, "snapshot")
            else:
                missed = (one for one in self._changes if one.seq > seen and one.topic in topics)
                parts += [self._event(one.topic, one.data, one.seq) for one in missed]
        for topic, (number, data) in self._frames.items():
            if number > shown and topic in topics:
                parts.append(self._event(f"{topic}.frame", data, self._seq))
        return parts, self._seq, self._frame_number

    def _snapshots(self, topics: Collection[str], kind: str) -> list[bytes]:
        return [
            self._event(f"{name}.{kind}", _encode(topic.snapshot()), self._seq)
            for name, topic in self.topics.items()
            if name in topics
        ]

    def _event(self, name: str, data: bytes, seq: int) -> bytes:
        return b"id: %s.%d\nevent: %s\ndata: %s\n\n" % (self._epoch.encode(), seq, name.encode(), data)

    def _resumed(self, last_id: str) -> int | None:
        """The number of the last change that the reader has, if all later ones are kept."""
        epoch, _, number = last_id.partition(".")
        if epoch != self._epoch or not (number.isascii() and number.isdigit()) or len(number) > 18:
            return None
        seen = int(number)
        return seen if self._seq - len(self._changes) <= seen <= self._seq else None

    # ---- one task for all readers ----

    def _begin(self) -> None:
        if self._working is not None and not self._working.done():
            return
        for topic in self.topics.values():
            if topic.changes is not None:
                topic.changes()  # drops those from before: no reader has their beginning
        self._changes.clear()
        self._seq += 1
        self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        frame_at = time.monotonic()
        while self._readers or time.monotonic() - self._left_at < LINGER_S:
            if self._is_stopping():
                break
            try:
                changed = self._collect()
                if time.monotonic() >= frame_at and self._readers:
                    changed |= await self._make_frames()
                    frame_at = max(frame_at + FRAME_S, time.monotonic())
            except Exception:  # a faulty figure must not end the stream of the others
                log.exception("the console's events could not be made")
                changed = False
                await asyncio.sleep(FRAME_S)
            if changed:
                self._wake()
            await asyncio.sleep(CHANGES_S)
        self._wake()

    def _collect(self) -> bool:
        before = self._seq
        for name, topic in self.topics.items():
            found = None if topic.changes is None else topic.changes()
            if found is not None:
                self._seq += 1
                self._changes.append(_Change(self._seq, name, _encode(found)))
        return self._seq > before

    async def _make_frames(self) -> bool:
        found = False
        for name, topic in self.topics.items():
            frame = None if topic.frame is None else await topic.frame()
            if frame is not None:
                self._frame_number += 1
                self._frames[name] = (self._frame_number, _encode(frame))
                found = True
        return found

    def _wake(self) -> None:
        woken, self._woken = self._woken, asyncio.Event()
        woken.set()
