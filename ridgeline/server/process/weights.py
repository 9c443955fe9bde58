"""The files of each model before its engine starts: fetched from the sources of the settings, with a record.

Without --weight-sources they come from the cache and the hub, as for every other command.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.models.files.pull import ensure
from ridgeline.replica.weight_sources import LOCAL
from ridgeline.server.config import ServerConfig
from ridgeline.server.process.setup import ModelSetup

if TYPE_CHECKING:
    from ridgeline.replica.messages import WeightsFrom


@dataclass(frozen=True, slots=True)
class ReadyFiles:
    """segments: seconds of the start that were spent on them."""

    path: Path
    weights: WeightsFrom | None = None
    segments: dict[str, float] = field(default_factory=dict)


def ready_files(setup: ModelSetup, server: ServerConfig) -> ReadyFiles:
    """Raises ModelError where no source has the files."""
    model = setup.engine.model
    if not server.weight_sources:
        return ReadyFiles(ensure(model).path)
    from ridgeline.engine.caches.shipping import fetch_cache
    from ridgeline.models.sources.obtain import holders_of, obtain
    from ridgeline.replica.messages import WeightsFrom

    keys = server.accepted_keys()
    holders = holders_of(server.weight_sources, server.weight_peers, keys[0] if keys else "", model)
    began = time.monotonic()
    found = obtain(model, server.weight_sources, holders)
    segments = {"fetch": time.monotonic() - began}
    cache = None
    # Holders that failed a moment ago are not asked again.
    asked = holders if found.source == LOCAL else [found.holder] if found.holder else []
    if server.weight_caches and asked:
        began = time.monotonic()
        cache = fetch_cache(found.path, setup.engine, asked)
        segments["fetch cache"] = time.monotonic() - began
    limit = found.holder.limit_bytes_per_s if found.holder else None
    weights = WeightsFrom(found.source, found.bytes, found.seconds, limit, cache)
    return ReadyFiles(found.path, weights, segments)
