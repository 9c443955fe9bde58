"""A gateway with several workers before a fleet: each worker is a router, and no stream is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.faults.fleet.streams import at_rest, streams
from tests.fleet.controller.live_fleet import LiveFleet
from tests.gateway.services import redis_url
from tests.gateway.test_processes import Gateway
from tests.patience import PATIENCE_S

__all__ = ["redis_url"]  # a fixture
pytestmark = pytest.mark.slow
DETERMINISTIC = "[models.serve]\nkv_tokens = 16384\nmax_context = 512\ndeterministic = true\n"
STREAMS, TOKENS = 16, 60


class FleetGateway(Gateway):
    """`ridgeline gateway` with two workers before a fleet."""

    def __init__(self, folder: Path, fleet: LiveFleet, redis_url: str) -> None:
        self.folder, self.drain_s, self.config = folder, 10.0, folder / "gateway.toml"
        state = f'state_dir = "{folder / "gateway"}"'
        text = ["[gateway]", "port = 0", "workers = 2", state, 'log_format = "text"', "[admin]", "port = 0"]
        text += ["[redis]", f'url = "{redis_url}"', "[[upstreams]]", 'name = "pool"', 'kind = "fleet"']
        text += [f'control = "{fleet.state_dir / "controller.sock"}"']
        text += ["[[models]]", 'name = "*"', 'targets = ["pool/*"]']
        self.config.write_text("\n".join(text))
        self.start()

    def admin(self, method: str, path: str, **body: object) -> httpx.Response:
        key = (self.folder / "gateway" / "admin-key").read_text().strip()
        options = {} if method == "GET" else {"json": body}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request(method, self.admin_url + path, headers=headers, timeout=120, **options)  # type: ignore[arg-type]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def outcomes(self) -> dict[str, int]:
        return {row["group"]["outcome"]: row["requests"] for row in self.usage()["data"]}

    def figure(self, sample: str) -> float:
        """Of all workers together."""
        lines = self.admin("GET", "/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(sample)), 0.0)


@pytest.fixture
def fleet(tmp_path: Path, smollm2_path: Path) -> Iterator[LiveFleet]:
    live = LiveFleet(tmp_path, serve=DETERMINISTIC)
    try:
        live.up()
        live.fleet = live.status()["fleet"]
        yield live
    finally:
        live.close()


def test_two_workers_serve_a_fleet_lose_no_stream_and_find_stored_responses(
    fleet: LiveFleet, tmp_path: Path, redis_url: str
) -> None:
    gateway = FleetGateway(tmp_path, fleet, redis_url)
    try:
        secret = str(gateway.admin("POST", "/admin/keys", name="test").json()["secret"])
        with httpx.Client(base_url=gateway.url, headers={"authorization": f"Bearer {secret}"}) as http:
            until = time.monotonic() + PATIENCE_S
            while http.get("/v1/models").status_code != 200:
                assert time.monotonic() < until
                time.sleep(0.05)
        # One router of the fleet and two workers know the table.
        fleet.until(lambda: fleet.status()["routers_reporting"] == 3, "both workers report")
        undisturbed = asyncio.run(streams(gateway.url, STREAMS, TOKENS, secret=secret))
        assert all(one.done and not one.errors for one in undisturbed), [one.errors for one in undisturbed]
        victim = fleet.pid_of(sorted(fleet.serving_ids())[0])
        kill = lambda: os.kill(victim, signal.SIGKILL)  # noqa: E731
        got = asyncio.run(streams(gateway.url, STREAMS, TOKENS, kill, secret))
        assert [one.errors for one in got if one.errors] == []
        assert [one.told() for one in got] == [one.told() for one in undisturbed]
        fleet.until(lambda: fleet.serving() == 2 and at_rest(fleet), "two replicas serve, nothing is left")
        ended = 'ridgeline_fleet_requests_total{upstream="pool",model="chat",outcome='
        assert gateway.figure(f'{ended}"ok"}}') == 2 * STREAMS
        assert gateway.figure(f'{ended}"failed"}}') == 0
        assert gateway.figure('ridgeline_fleet_routers{upstream="pool"}') == 2

        # Each request on a new connection: both workers get some.
        url, headers = f"{gateway.url}/v1/responses", {"authorization": f"Bearer {secret}"}
        asked = {"model": "chat", "input": "Say a word.", "max_output_tokens": 4}
        first = httpx.post(url, json=asked, headers=headers, timeout=PATIENCE_S).json()["id"]
        for _ in range(8):
            more = httpx.post(
                url, json=asked | {"previous_response_id": first}, headers=headers, timeout=PATIENCE_S
            )
            assert (more.status_code, more.json().get("previous_response_id")) == (200, first), more.text
        asked_for = 2 * STREAMS + 9 + 1  # and the list of models
        fleet.until(lambda: gateway.outcomes().get("ok") == asked_for, "a row of each request")
        assert not gateway.outcomes().keys() & {"failed", "cancelled", "lost", "interrupted"}
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(2 * PATIENCE_S) == 0
    finally:
        gateway.end()
    assert fleet.run("down").returncode == 0
    assert fleet.pids() == []
