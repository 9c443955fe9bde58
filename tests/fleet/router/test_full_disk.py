"""The journal's disk is full: what cannot be kept is refused, the rest is served, and it recovers."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

from ridgeline.fleet.messages import ModelEntry
from tests.fleet.router.conftest import Stage
from tests.fleet.router.scripted_replica import MODEL
from tests.fleet.router.test_durable_hold import PATH, Router, chat, is_waiting, key, numbers
from tests.patience import PATIENCE_S


async def test_a_full_disk_refuses_what_it_cannot_keep_and_is_used_again_when_there_is_room(
    stage: Stage, tmp_path: Path
) -> None:
    entry = ModelEntry(MODEL, max_held=32, hold_s=PATIENCE_S, cold_s=PATIENCE_S, durable=True)
    stage.controller.set(model=entry)
    journal = tmp_path / "held" / "journal"
    router = Router(stage, held_dir=str(tmp_path / "held"), keeps_journal=True)
    try:
        asked = [asyncio.create_task(router.client.post(PATH, json=chat(0), headers=key(0)))]
        await is_waiting(router.client, "key 0")
        kept = journal.stat().st_size
        # The kernel refuses to let a file grow beyond this: the record is cut in its middle.
        limit = (kept + 100, resource.RLIM_INFINITY)
        resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE, limit)
        for number in (1, 2):
            refused = await router.client.post(PATH, json=chat(number), headers=key(number))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "held_unavailable")
        assert journal.stat().st_size == kept  # no part of a record is left
        asked.append(asyncio.create_task(router.client.post(PATH, json=chat(3))))  # without a key
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE, unlimited)
        asked.append(asyncio.create_task(router.client.post(PATH, json=chat(4), headers=key(4))))
        await is_waiting(router.client, "key 4")
        router.kill()
        await asyncio.gather(*asked, return_exceptions=True)
        router.start()
        (first,) = await stage.add()
        for number in (0, 4):
            again = await router.client.post(PATH, json=chat(number), headers=key(number))
            assert again.status_code == 200
        assert numbers(first.bodies) == [0, 4]
        assert not journal.with_suffix(".damaged").exists()
    finally:
        await router.close()
