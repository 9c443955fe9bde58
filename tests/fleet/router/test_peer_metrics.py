"""Router processes on one port: a scrape of any of them shows all, and a dead one delays none.

Every process has its own counters: a page never shows less than the one before, except after a restart.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.fleet.router.conftest import Stage
from tests.fleet.router.scripted_replica import MODEL
from tests.fleet.router.test_durable_hold import PATH, Router, chat
from tests.patience import PATIENCE_S


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    page = await client.get("/metrics")
    assert page.status_code == 200
    rows = [line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#")]
    assert len({name for name, _ in rows}) == len(rows)
    return {name.removeprefix("ridgeline_fleet_"): float(value) for name, value in rows}


async def figures_of(routers: int, client: httpx.AsyncClient) -> dict[str, float]:
    """The figures once this number of routers is in them, and all replicas are up."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            seen = await figures(client)
            up = [value for name, value in seen.items() if name.startswith("replica_up")]
            if seen["routers"] == routers and up and min(up) > 0:
                return seen
            await asyncio.sleep(0.05)


def of(name: str, router: str, more: str = "") -> str:
    return f'{name}{{model="{MODEL}"{more},router="{router}"}}'


async def test_a_scrape_of_any_router_shows_all_of_them(stage: Stage, tmp_path: Path) -> None:
    await stage.add(2)
    folder = str(tmp_path / "routers")
    routers = [Router(stage, name=f"router-{n}", peers_dir=folder) for n in range(2)]
    ok = [of("requests_total", f"router-{n}", ',outcome="ok"') for n in range(2)]
    try:
        for count, router in zip((3, 4), routers, strict=True):
            for number in range(count):
                assert (await router.client.post(PATH, json=chat(number))).status_code == 200
        for router in routers:
            seen = await figures_of(2, router.client)
            assert [seen[name] for name in ok] == [3, 4]
            assert [seen[of("ttft_seconds_count", f"router-{n}")] for n in range(2)] == [3, 4]
            assert sum(value for name, value in seen.items() if name.startswith("replica_requests")) == 7
            assert seen['replica_up{model="counter",replica="r0"}'] == 1  # gauges are merged
            assert seen["controller_connected"] == 1
        routers[0].kill()  # its socket is left behind
        seen = await figures(routers[1].client)
        assert (seen["routers"], ok[0] in seen, seen[ok[1]]) == (1, False, 4)
        routers[0].start()
        seen = await figures_of(2, routers[1].client)
        # Its own series begins again, which Prometheus takes for a reset; no other series falls.
        assert (seen.get(ok[0], 0), seen[ok[1]]) == (0, 4)
    finally:
        for router in routers:
            await router.close()
