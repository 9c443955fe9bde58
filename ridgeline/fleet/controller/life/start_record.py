"""record_starts(): keeps the parts of each cold start in the state directory, for plans and simulations."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from ridgeline.fleet.config import FleetSettings
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.replica.cold_starts import ColdStart, add_start

log = logging.getLogger("ridgeline.fleet")


def record_starts(settings: FleetSettings, replicas: Iterable[Replica]) -> None:
    """Of replicas that serve, once the feed has told the server's part. Each start is recorded once."""
    for replica in replicas:
        started = replica.started
        if replica.is_recorded or replica.was_adopted or not replica.serves or started is None:
            continue
        replica.is_recorded = True
        start = ColdStart(
            at=time.time(),
            source=replica.source,
            hardware=started.hardware,
            substrate=settings.substrate.kind,
            segments=dict(replica.segments),
            weights=started.weights,
            weight_bytes=started.weight_bytes,
        )
        try:
            add_start(settings.state_dir, start)
        except OSError as error:
            log.warning("the cold start of %s cannot be recorded: %s", replica.id, error)
