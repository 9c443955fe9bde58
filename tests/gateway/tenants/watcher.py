"""A child process that watches a store and prints what it knows of one key, each time that changes."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.key_watch import KeyWatch
from ridgeline.gateway.tenants.store import Store


async def main(url: str, state_dir: str, secret: str) -> None:
    watch = KeyWatch(Store(StoreConfig(url=url), Path(state_dir)))
    await watch.start()
    last = None
    while True:
        key = watch.table.lookup(secret)
        known = f"{key.name} {key.limits.requests_per_minute}" if key else watch.table.refusal(secret).code
        if known != last:
            print(f"{time.time():.3f} {known}", flush=True)
        last = known
        await asyncio.sleep(0.005)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
