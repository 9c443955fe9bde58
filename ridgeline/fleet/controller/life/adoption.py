"""Which replicas of an earlier controller still run.

A replica is recognised by its process's number and start time, or by the mark in its environment. A replica
without a record has to be ended: no router knows it.
"""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.fleet.controller.store import FleetStore, StoredReplica
from ridgeline.fleet.substrates.substrate import Handle, Substrate


class Found(NamedTuple):
    running: list[tuple[StoredReplica, Handle]]
    gone: list[tuple[StoredReplica, Handle | None]]
    orphans: list[Handle]


async def find_replicas(store: FleetStore, substrate: Substrate, fleet: str) -> Found:
    marked = {handle.replica: handle for handle in await substrate.find(fleet)}
    found = Found([], [], [])
    for one in await store.replicas():
        # The stored place is the one that was started. After a kill there may be only the mark.
        handle = Handle(one.id, one.place) if one.place else marked.get(one.id)
        marked.pop(one.id, None)
        seen = None if handle is None else await substrate.poll(handle)
        if handle is not None and seen is not None and seen.phase != "exited" and one.state != "lost":
            found.running.append((one, handle))
        else:
            found.gone.append((one, handle))
    found.orphans.extend(marked.values())
    return found
