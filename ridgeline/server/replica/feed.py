"""ReplicaFeed: one model's load and prefix events, for the readers of GET /replica/feed.

Nothing is followed before the first reader connects, and nothing after the last one has been gone for
LINGER_S. Events are numbered and kept in a bounded log: a reader that reconnects in time gets what it missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.errors import EngineDied
from ridgeline.engine.kv.prefix_index import PrefixIndex
from ridgeline.engine.link.messages import PrefixChanges
from ridgeline.replica.messages import LOAD_EVERY_S, FeedLine, Load, Removed, Snapshot, Started, Stored
from ridgeline.replica.prompt_blocks import BLOCK_BYTES, FIELDS, prefix_root, prompt_blocks
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.replica.prefix_names import PrefixNames, blocks_at
from ridgeline.server.replica.version import ReplicaEpoch, replica_version
from ridgeline.server.served_models import Model, ServedModels

LOG_EVENTS = 4096
LINGER_S = 60.0
MOST_BLOCKS_PER_LINE = 4096
NAMING_COST = 2  # bytes of body that take as long as a token's share of a hash

_fields: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ReplicaFeed:
    def __init__(self, served_models: ServedModels, model: Model) -> None:
        self._served_models = served_models
        self._model = model
        self._names = PrefixNames()
        self._seq = 0
        self._log: deque[Stored | Removed] = deque(maxlen=LOG_EVENTS)
        self._changed = asyncio.Event()  # replaced at every change
        self._readers = 0
        self._left_at = 0.0
        self._client: AsyncClient | None = None  # the one whose prefixes are followed
        self._pinging: asyncio.Task[None] | None = None
        self._ended_before = 0  # requests of earlier engine processes
        self._naming: set[asyncio.Task[None]] = set()

    @property
    def is_wanted(self) -> bool:
        if self._readers:
            return True
        if self._client is not None and time.monotonic() - self._left_at > LINGER_S:
            self._stop_following()
        return self._client is not None

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────

    def asked(self, body: bytes, prompt_ids: list[int], namespace: str) -> None:
        """A request was accepted: its names are tied to the KV blocks that it will have."""
        client = self._client
        if client is None or client.closed.is_set() or not client.hello.block_size:
            return
        if len(prompt_ids) < client.hello.block_size:
            return
        task = asyncio.create_task(self._name(client, body, prompt_ids, namespace))
        self._naming.add(task)
        task.add_done_callback(self._naming.discard)

    async def _name(self, client: AsyncClient, body: bytes, prompt_ids: list[int], namespace: str) -> None:
        root = prefix_root(self._model.names[0], "", namespace)
        cost = len(body) + NAMING_COST * len(prompt_ids)
        names, blocks = await off_loop(cost, lambda: named_blocks(client, body, prompt_ids, namespace, root))
        if client is self._client:
            self._say(self._names.register(names, blocks), ())

    def _hear(self, changes: PrefixChanges) -> None:
        self._say(*self._names.change(changes.stored, changes.removed, changes.whole))

    def _say(self, stored: list[int], removed: list[int] | tuple[()]) -> None:
        for at in range(0, len(removed), MOST_BLOCKS_PER_LINE):
            self._seq += 1
            self._log.append(Removed(self._seq, tuple(removed[at : at + MOST_BLOCKS_PER_LINE])))
        for at in range(0, len(stored), MOST_BLOCKS_PER_LINE):
            self._seq += 1
            self._log.append(Stored(self._seq, tuple(stored[at : at + MOST_BLOCKS_PER_LINE])))
        if stored or removed:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    # ── readers ──────────────────────────────────────────────────────────────────────────────────────────

    async def lines(self, epoch: str, after: int) -> AsyncIterator[list[FeedLine]]:
        """What one reader gets, until the engine is stopped. epoch, after: where it has been, if anywhere."""
        self._readers += 1
        try:
            while self._model.engine.client is None:
                await asyncio.sleep(LOAD_EVERY_S)
            self._follow()
            started = self._started()
            knows = epoch == started.epoch and self._has_after(after)
            seen = after if knows else self._seq
            yield [started] if knows else [started, self._snapshot()]
            load_at = 0.0
            while True:
                self._follow()
                lines, seen = self._lines_after(seen)
                if time.monotonic() >= load_at:
                    lines.append(self._load())
                    load_at = time.monotonic() + LOAD_EVERY_S
                if lines:
                    yield lines
                if self._has_stopped():
                    return
                await self._wait(seen, load_at)
        finally:
            self._readers -= 1
            self._left_at = time.monotonic()

    async def _wait(self, seen: int, load_at: float) -> None:
        """Until something has happened or the next Load is due."""
        changed = self._changed
        if seen < self._seq:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, load_at - time.monotonic())):
                await changed.wait()

    def _lines_after(self, seen: int) -> tuple[list[FeedLine], int]:
        if not self._has_after(seen):  # the reader is too slow for the log
            return [self._snapshot()], self._seq
        return [event for event in self._log if event.seq > seen] if seen < self._seq else [], self._seq

    def _has_after(self, seq: int) -> bool:
        """Whether every event after this one is in the log."""
        return self._seq - len(self._log) <= seq <= self._seq

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._seq, tuple(self._names.stored()))

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────

    def _follow(self) -> None:
        """Follow the engine's prefix cache; a new engine process begins with an empty one."""
        client = self._model.engine.client
        if client is None or client is self._client or client.closed.is_set():
            return
        if self._client is not None:
            self._ended_before += self._client.accepted
            self._say([], self._names.clear())
        self._client = client
        if client.hello.task == "generate":
            client.on_prefixes = self._hear
            client.watch_prefixes(True)

    def _stop_following(self) -> None:
        """No reader came back: the next one starts with a snapshot."""
        client, self._client = self._client, None
        if client is not None and not client.closed.is_set() and client.hello.task == "generate":
            client.watch_prefixes(False)
            client.on_prefixes = lambda changes: None
        self._names.clear()
        self._log.clear()
        self._seq += 1  # no position before this one is in the log

    def _has_stopped(self) -> bool:
        engine = self._model.engine
        return engine.draining and (engine.client is None or engine.client.closed.is_set())

    def _started(self) -> Started:
        client, model = self._model.engine.client, self._model
        assert client is not None
        hello, served_models = client.hello, self._served_models
        return Started(
            epoch=served_models.part(ReplicaEpoch).value,
            pid=os.getpid(),
            model=model.names[0],
            names=model.names,
            version=replica_version(served_models, client),
            max_running=hello.max_running,
            kv_blocks=hello.kv_tokens // hello.block_size if hello.block_size else 0,
            block_size=hello.block_size,
            segments={**model.start_segments, **hello.seconds},
            weight_bytes=hello.bytes.get("weights", 0),
            limits=hello.limits,
        )

    def _load(self) -> Load:
        """The engine's last figures; it is asked for newer ones, and the next line has them."""
        engine = self._model.engine
        client = engine.client or self._client
        assert client is not None
        is_up = engine.client is not None and not client.closed.is_set()
        if is_up and (self._pinging is None or self._pinging.done()):
            self._pinging = asyncio.create_task(_ping(client))
        stats = client.stats
        state: Literal["starting", "ready", "draining"] = "ready" if engine.ready()[0] else "starting"
        accepted = self._ended_before + client.accepted
        return Load(
            seq=self._seq,
            state="draining" if engine.draining else state,
            running=stats.running if is_up else 0,
            waiting=stats.waiting + stats.waiting_background if is_up else 0,
            queued_tokens=client.queued_tokens,
            kv_blocks_held=stats.kv_blocks_held if is_up else 0,
            kv_blocks_cached=stats.kv_blocks_cached if is_up else 0,
            steps=stats.steps,
            accepted=accepted,
            ended=accepted - client.open_requests,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
        )


class ReplicaFeeds:
    """The feed of each served model."""

    def __init__(self, served_models: ServedModels) -> None:
        self._feeds = {model.names[0]: ReplicaFeed(served_models, model) for model in served_models.models}

    def of(self, model: Model) -> ReplicaFeed:
        return self._feeds[model.names[0]]

    @property
    def any_wanted(self) -> bool:
        return any(feed.is_wanted for feed in self._feeds.values())


async def _ping(client: AsyncClient) -> None:
    with contextlib.suppress(EngineDied):
        await client.ping()


def named_blocks(
    client: AsyncClient, body: bytes, prompt_ids: list[int], namespace: str, root: str
) -> tuple[list[int], list[bytes]]:
    """The names of a request's prompt, and the KV block in which each ends."""
    fields = {name: bytes(raw) for name, raw in _fields.decode(body).items() if name in FIELDS}
    names = prompt_blocks(fields, root)
    if not names:
        return [], []
    hello = client.hello
    hashes: list[bytes] = []
    PrefixIndex(hello.block_size, hello.prefix_salt).extend(hashes, prompt_ids, "", namespace)
    size = sum(map(len, fields.values())) + len(fields) - 1  # as prompt_blocks joins them
    shares = [BLOCK_BYTES * (place + 1) / size for place in range(len(names))]
    return names, blocks_at(hashes, len(prompt_ids), hello.block_size, shares)
