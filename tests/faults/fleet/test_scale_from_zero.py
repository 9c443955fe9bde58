"""1,000 requests at zero replicas, kill -9 of the router and of the front: all answered, in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ridgeline.fleet.queueing.held_ledger import HeldRequest, decode_record
from ridgeline.fleet.queueing.journal import split
from ridgeline.web.open_files import allow_open_files
from tests.fleet.controller.live_fleet import LiveFleet
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
COUNT = 1000
ZERO = f"""
[models.limits]
cold_s = {10 * PATIENCE_S}
[models.scaling]
min = 0
max = 1
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LiveFleet]:
    live = LiveFleet(tmp_path, replicas=0, more=ZERO)
    try:
        live.up()
        live.until(lambda: is_ready(live), "the router serves")
        yield live
    finally:
        live.close()


def test_requests_at_zero_survive_kill_9_of_the_router_and_of_the_whole_front(fleet: LiveFleet) -> None:
    allow_open_files(COUNT + 1024)
    answers = asyncio.run(disturbed(fleet, fleet.url))
    assert [status for status, _ in answers.values()] == [200] * COUNT
    kept = [record for record in records(fleet) if isinstance(record, HeldRequest)]
    order = [record.key for record in kept]
    assert sorted(order) == sorted(answers)
    created = [answers[key][1]["created"] for key in order]
    # Seconds on the replica's clock: two requests that leave together may meet another second.
    assert all(later >= before - 1 for before, later in pairwise(created))
    events = fleet.client.get("/fleet/events")["events"]
    assert [event["kind"] for event in events].count("start") == 1
    assert "router" in {event["kind"] for event in events}


async def disturbed(fleet: LiveFleet, url: str) -> dict[str, tuple[int, Any]]:
    """The answers by key. Clients ask again with their keys after the router was killed."""
    limits = aiohttp.ClientTimeout(total=10 * PATIENCE_S)
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
        first = [asyncio.create_task(ask(session, url, number)) for number in range(COUNT)]
        replica = await asyncio.to_thread(stopped_replica, fleet)
        try:
            await asyncio.to_thread(fleet.until, lambda: len(records(fleet)) == COUNT, "all are journalled")
            async with session.get(f"{url}/fleet/held/key-{COUNT - 1}") as shown:
                assert shown.status == 202
                assert (await shown.json())["position"] > 0
            os.kill(router_pid(fleet), signal.SIGKILL)
            lost = await asyncio.gather(*first, return_exceptions=True)
            assert all(isinstance(one, aiohttp.ClientError) for one in lost)
            await asyncio.to_thread(fleet.until, lambda: is_ready(fleet), "the controller starts a router")
            await asyncio.to_thread(kill_front, fleet)
            url = fleet.url
        finally:
            os.kill(replica, signal.SIGCONT)
        again = [ask(session, url, number, tries=100) for number in range(COUNT)]
        return dict(await asyncio.gather(*again))


async def ask(
    session: aiohttp.ClientSession, url: str, number: int, tries: int = 1
) -> tuple[str, tuple[int, Any]]:
    key = f"key-{number}"
    messages = [{"role": "user", "content": f"Say {number}."}]
    body = {"model": "chat", "messages": messages, "max_tokens": 2, "temperature": 0}
    while True:
        tries -= 1
        with contextlib.suppress(aiohttp.ClientConnectionError) if tries else contextlib.nullcontext():
            headers = {"idempotency-key": key}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                return key, (answer.status, await answer.json())
        await asyncio.sleep(0.5)


def is_ready(fleet: LiveFleet) -> bool:
    with urllib.request.urlopen(f"{fleet.url}/ready") as answer:
        return bool(answer.status == 200)


def kill_front(fleet: LiveFleet) -> None:
    """Router and controller together; then a new fleet on the same state."""
    router = router_pid(fleet)
    fleet.kill_controller()
    os.kill(router, signal.SIGKILL)
    fleet.up()
    fleet.until(lambda: is_ready(fleet), "the new router serves")


def stopped_replica(fleet: LiveFleet) -> int:
    """The process of the replica that the first request starts: it stands still until all others wait."""
    found: list[int] = []
    fleet.until(lambda: found.append(fleet.pid_of("chat-1")) or True, "the first replica's process")
    os.kill(found[0], signal.SIGSTOP)
    return found[0]


def records(fleet: LiveFleet) -> list[Any]:
    """Of the journal, as it is on the disk."""
    found, _ = split((fleet.state_dir / "held" / "journal").read_bytes())
    return [decode_record(record) for record in found]


def router_pid(fleet: LiveFleet) -> int:
    for pid in fleet.pids():
        with contextlib.suppress(OSError):
            if b"ridgeline.fleet.router.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise AssertionError("no router runs")
