"""end_left(): ends the processes that a killed controller left behind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from ridgeline.fleet.controller.life.adoption import find_replicas
from ridgeline.fleet.controller.routers import find_routers
from ridgeline.fleet.controller.store import FILE, FleetStore
from ridgeline.fleet.substrates.substrate import Substrate
from ridgeline.options import OptionError

ROUTER_S = 10.0


async def end_left(state_dir: Path, substrate: Substrate, drain_s: float) -> list[str]:
    """End them and return their names. Takes the lease, so a running controller must be asked instead."""
    if not (state_dir / FILE).exists():
        return []
    store = FleetStore(state_dir)
    await store.open()
    try:
        if (holder := await store.lease.try_take()) is not None:
            raise OptionError(
                f"the controller (process {holder.pid}) is running but does not answer; end it first"
            )
        fleet = await store.fleet_id()
        routers = find_routers(fleet)
        for router in routers:
            router.signal(signal.SIGTERM)
        for _ in range(int((drain_s + ROUTER_S) / 0.1)):
            if not any(router.lives for router in routers):
                break
            await asyncio.sleep(0.1)
        for router in routers:
            router.signal(signal.SIGKILL)
        found = await find_replicas(store, substrate, fleet)
        handles = [*(handle for _, handle in found.running), *found.orphans]
        await asyncio.gather(*(substrate.stop(handle, drain_s) for handle in handles))
        for one, _ in (*found.running, *found.gone):
            await store.remove_replica(one.id)
        await store.lease.release()
        return [*(f"router {one.number}" for one in routers), *(handle.replica for handle in handles)]
    finally:
        await store.close()
        await substrate.close()
