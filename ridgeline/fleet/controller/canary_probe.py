"""probe_canary(): judges a canary that no request has reached, by generations on it and on an old replica."""

from __future__ import annotations

import time
from statistics import median

from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.life.replica_link import ReplicaLink

PROBES = 5
TOKENS = 8
LEAST_MS = 50.0  # a smaller difference says nothing


async def probe_canary(link: ReplicaLink, new: Replica, old: Replica | None, latency_ratio: float) -> str:
    """Why the new version is worse; empty: it is not. The two take turns, so that both see the same load.

    An old replica that fails is not compared: errors are quick, and the new version may repair them.
    """
    times_ms: dict[str, list[float]] = {new.id: []} if old is None else {new.id: [], old.id: []}
    for _ in range(PROBES):
        for replica in (new, old):
            if replica is None:
                continue
            began = time.monotonic()
            reason = await link.generates(replica.url, replica.model, TOKENS)
            if reason and replica is new:
                return reason
            if reason:
                old = None
                continue
            times_ms[replica.id].append((time.monotonic() - began) * 1e3)
    if old is None:
        return ""
    before, after = median(times_ms[old.id]), median(times_ms[new.id])
    if after > latency_ratio * before and after - before > LEAST_MS:
        return (
            f"{TOKENS} tokens took {after:.0f} ms against {before:.0f} ms of the old version; "
            f"allowed is {latency_ratio:g} times as much"
        )
    return ""
