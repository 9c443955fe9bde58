"""ReplicaFeed: one model's load and prefix events, for the readers of GET /replica/feed.

The engine's cache is followed from the first reader's connection until LINGER_S after the last one's end.
Events are numbered and kept in a bounded log: a reader that reconnects in time gets the events it missed.
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
from ridgeline.machine import processor_name
from ridgeline.replica.load_pace import LOAD_EVERY_S, LoadPace
from ridgeline.replica.messages import (
    MOST_ADOPTED,
    FeedLine,
    Load,
    Removed,
    Snapshot,
    Started,
    Stored,
)
from ridgeline.replica.prompt_blocks import BLOCK_BYTES, FIELDS, prefix_root, prompt_blocks
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.replica.prefix_names import PrefixNames, blocks_at
from ridgeline.server.replica.version import ReplicaEpoch, replica_version
from ridgeline.server.served_models import Model, ServedModels

LOG_EVENTS = 4096
LINGER_S = 60.0
MOST_BLOCKS_PER_LINE = 4096
NAMING_COST = 2  # bytes of a body that take as long to hash as one token

_fields: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ReplicaFeed:
    def __init__(self, served_models: ServedModels, model: Model) -> None:
        self._served_models = served_models
        self._model = model
        self._names = PrefixNames()
        self._seq = 0
        self._log: deque[Stored | Removed] = deque(maxlen=LOG_EVENTS)
        self._changed = asyncio.Event()  # replaced at every change
        self._paces: set[LoadPace] = set()  # of the readers
        self._left_at = 0.0
        self._client: AsyncClient | None = None  # the engine process whose cache is followed
        self._pinging: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._beats, self._step_s, self._turns = 0, 0.0, 0
        self._ended_before = 0  # requests of earlier engine processes
        self._naming: set[asyncio.Task[None]] = set()
        self._adopted: deque[str] = deque(maxlen=MOST_ADOPTED)
        self._stored: deque[str] = deque(maxlen=MOST_ADOPTED)  # the adopted ones that came to their end here
        self._num_adopted = 0  # also those that are forgotten

    @property
    def is_wanted(self) -> bool:
        if self._paces:
            return True
        if self._client is not None and time.monotonic() - self._left_at > LINGER_S:
            self._stop_following()
        return self._client is not None

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────

    def asked(self, body: bytes, prompt_ids: list[int], namespace: str) -> None:
        """A request was accepted: tie its names to the KV blocks that it will have."""
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

    def adopt(self, response_id: str) -> None:
        """This server continues a stream that another one began, and stores its response at the end.

        Readers are told at once: they hear it before the client has the last event.
        """
        self._adopted.append(response_id)
        self._num_adopted += 1
        self._wake()

    def stored(self, response_id: str) -> None:
        """It reached its end here. Only now do later readers hear of it: another server may have ended it."""
        self._stored.append(response_id)
        self.adopt(response_id)  # for readers that came in between

    def _say(self, stored: list[int], removed: list[int] | tuple[()]) -> None:
        for at in range(0, len(removed), MOST_BLOCKS_PER_LINE):
            self._seq += 1
            self._log.append(Removed(self._seq, tuple(removed[at : at + MOST_BLOCKS_PER_LINE])))
        for at in range(0, len(stored), MOST_BLOCKS_PER_LINE):
            self._seq += 1
            self._log.append(Stored(self._seq, tuple(stored[at : at + MOST_BLOCKS_PER_LINE])))
        if stored or removed:
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ── readers ──────────────────────────────────────────────────────────────────────────────────────────

    async def lines(self, epoch: str, after: int) -> AsyncIterator[list[FeedLine]]:
        """Yield one reader's lines until the engine is stopped. epoch, after: the last event that it has."""
        pace = LoadPace()
        self._paces.add(pace)
        try:
            while self._model.engine.client is None:
                await asyncio.sleep(LOAD_EVERY_S)
            self._follow()
            started = self._started()
            knows = epoch == started.epoch and self._has_after(after)
            seen, told = after if knows else self._seq, self._num_adopted
            yield [started] if knows else [started, self._snapshot()]
            while True:
                self._follow()
                lines, seen = self._lines_after(seen)
                if time.monotonic() >= self._due_at(pace) or told < self._num_adopted:
                    lines.append(self._load(told))
                    told = self._num_adopted
                    pace.told(self._accepted, time.monotonic())
                if lines:
                    yield lines
                if self._has_stopped():
                    return
                await self._wait(seen, told, self._due_at(pace))
        finally:
            self._paces.discard(pace)
            self._left_at = time.monotonic()

    async def _wait(self, seen: int, told: int, load_at: float) -> None:
        """Wait until there is an event or the next Load is due."""
        changed = self._changed
        if seen < self._seq or told < self._num_adopted:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, load_at - time.monotonic())):
                await changed.wait()

    def _due_at(self, pace: LoadPace) -> float:
        return pace.due_at(self._accepted, self._open_requests)

    def _hear_accepted(self) -> None:
        """A request was accepted. Readers hear it at once where it changes the load much."""
        accepted, open_requests = self._accepted, self._open_requests
        if any(pace.is_early(accepted, open_requests) for pace in self._paces):
            self._wake()

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

    @property
    def _accepted(self) -> int:
        """Requests since the start, also of earlier engine processes."""
        return self._ended_before + (0 if self._client is None else self._client.accepted)

    @property
    def _open_requests(self) -> int:
        return 0 if self._client is None else self._client.open_requests

    def _follow(self) -> None:
        """Follow the engine's prefix cache; a new engine process begins with an empty one."""
        client = self._model.engine.client
        if client is None or client is self._client or client.closed.is_set():
            return
        if self._client is not None:
            self._ended_before += self._client.accepted
            self._say([], self._names.clear())
        self._client = client
        client.on_accepted = self._hear_accepted
        if client.hello.task == "generate":
            client.on_prefixes = self._hear
            client.watch_prefixes(True)

    def _stop_following(self) -> None:
        """Stop following the cache: the next reader starts with a snapshot."""
        client, self._client = self._client, None
        if client is not None:
            client.on_accepted = lambda: None
        if client is not None and not client.closed.is_set() and client.hello.task == "generate":
            client.watch_prefixes(False)
            client.on_prefixes = lambda changes: None
        self._names.clear()
        self._log.clear()
        self._seq += 1  # the log has no event before this one

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
            weights=None if model.files is None else model.files.weights,
            hardware=hardware_name(hello.backend),
            adopted=tuple(self._stored),
        )

    def _load(self, told: int) -> Load:
        """The engine's last figures. Asks it for newer ones, which the next line has.

        told: how many adopted responses the reader knows.
        """
        engine = self._model.engine
        client = engine.client or self._client
        assert client is not None
        is_up = engine.client is not None and not client.closed.is_set()
        if is_up and (self._pinging is None or self._pinging.done()):
            self._pinging = asyncio.create_task(self._ping(client))
        if is_up and (self._beating is None or self._beating.done()):
            self._beating = asyncio.create_task(self._beat(client))
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
            busy_s=stats.busy_s,
            prefill_tokens=stats.prefill_tokens,
            beats=self._beats,
            step_s=self._step_s,
            turns=self._turns,
            adopted=self._adopted_after(told),
        )

    def _adopted_after(self, told: int) -> tuple[str, ...]:
        new = min(self._num_adopted - told, len(self._adopted))
        return tuple(dict.fromkeys(list(self._adopted)[-new:])) if new else ()

    async def _ping(self, client: AsyncClient) -> None:
        with contextlib.suppress(EngineDied):
            await client.ping()
            self._turns += 1

    async def _beat(self, client: AsyncClient) -> None:
        with contextlib.suppress(EngineDied):
            self._step_s = await client.step_age()
            self._beats += 1


class ReplicaFeeds:
    """The feed of each served model."""

    def __init__(self, served_models: ServedModels) -> None:
        self._feeds = {model.names[0]: ReplicaFeed(served_models, model) for model in served_models.models}

    def of(self, model: Model) -> ReplicaFeed:
        return self._feeds[model.names[0]]

    @property
    def any_wanted(self) -> bool:
        return any(feed.is_wanted for feed in self._feeds.values())


def hardware_name(backend: str) -> str:
    """The GPU's name, or the processor's. backend: as the engine describes it."""
    name, _, rest = backend.partition(" (")
    return (
        rest.partition("), weights")[0].removesuffix(", deterministic")
        if name == "cuda"
        else processor_name()
    )


def named_blocks(
    client: AsyncClient, body: bytes, prompt_ids: list[int], namespace: str, root: str
) -> tuple[list[int], list[bytes]]:
    """Names of a request's prompt blocks, and the KV block in which each ends."""
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
