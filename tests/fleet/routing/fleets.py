"""Books with replicas in them, and Load lines, for the tests of routing."""

from __future__ import annotations

from typing import Any

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry, State, Table
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.replica.messages import Load, Started
from tests.clock import Clock


def entry(number: int, state: State = "ready", **changes: Any) -> ReplicaEntry:
    return ReplicaEntry(
        **{
            "id": f"m-{number}",
            "model": "m",
            "url": "http://x",
            "state": state,
            "epoch": "e",
            "version": "v1",
            **changes,
        }
    )


def table(*entries: ReplicaEntry, generation: int = 1) -> Table:
    return Table(generation, (ModelEntry("m", ("alias",), ("ada",)),), entries)


def started(epoch: str = "e", max_running: int = 8, kv_blocks: int = 1000) -> Started:
    return Started(epoch, 1, "m", ("m",), "v1", max_running, kv_blocks, 16, {})


def load(**changes: Any) -> Load:
    idle = {
        "seq": 0,
        "state": "ready",
        "running": 0,
        "waiting": 0,
        "queued_tokens": 0,
        "kv_blocks_held": 0,
        "kv_blocks_cached": 0,
        "steps": 0,
        "accepted": 0,
        "ended": 0,
        "prompt_tokens": 0,
        "output_tokens": 0,
        "prefix_queries": 0,
        "prefix_hits": 0,
    }
    return Load(**{**idle, **changes})


def book_of(
    *entries: ReplicaEntry, clock: Clock | None = None, max_running: int = 8, routers: int = 1
) -> LoadBook:
    """A book whose replicas have all been heard."""
    book = LoadBook(clock or Clock(), routers)
    book.set_table(table(*entries))
    for one in entries:
        book.hear(one.id, started(one.epoch, max_running))
        book.hear(one.id, load())
    return book
