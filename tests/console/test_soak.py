"""The console stays open: its heap does not grow with real frames and requests.

One minute by default; RIDGELINE_TEST_SOAK_S=3600 makes it the hour of the bar.
"""

from __future__ import annotations

import os
import time
from typing import Any

import httpx
import pytest

from tests.console.browser import launched, tab_of
from tests.console.threaded_stage import serving
from tests.patience import PATIENCE_S
from tests.server.scripted_client import say
from tests.server.stage import Stage

SOAK_S = float(os.environ.get("RIDGELINE_TEST_SOAK_S", "60"))
SAMPLES = 12
MOST_BYTES = 500_000  # that the last quarter's median may exceed the first's
# Fills every list that is bounded: 300 frames, 2,000 requests. Without it, growth up to the bound is no leak.
FILL = """async () => {
  const { feed } = await import("console/events.js");
  const hear = (event, data) => feed.hear({ event, id: "", data: JSON.stringify(data) });
  const times = { admitted: 3, first: 40, last: 90, end: 91, sent: 92, chunks: [3], prompt: 5, out: 9 };
  const begin = Date.now() / 1000 - 3600;
  for (let n = 0; n < 2500; n++) {
    const record = { id: `old${n}`, model: "m", path: "/v1/completions", at: begin * 1000 + n };
    hear("requests", [{ ...record, state: "done", ...times }]);
    if (n % 5 === 0) for (const { name } of feed.last.get("metrics.frame").models)
      hear("metrics.frame", { at: begin + n, models: [{ name, ready: true, steps: n }] });
  }
}"""


@pytest.mark.slow
def test_the_heap_of_an_open_console_does_not_grow() -> None:
    with (
        launched() as browser,
        serving(lambda: Stage(script=say("a short answer", pause_s=0.001))) as (url, _),
        tab_of(browser, url) as tab,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        page = tab.open("#/live")
        page.wait_for_selector(".model-grid")
        page.click('nav a[href="#/requests"]')
        page.wait_for_selector(".timeline")
        page.evaluate(FILL)
        session: Any = page.context.new_cdp_session(page)

        def heap() -> float:
            session.send("HeapProfiler.collectGarbage")
            return float(session.send("Runtime.getHeapUsage")["usedSize"])

        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        found, begun = [], time.monotonic()
        for number in range(1, SAMPLES + 1):
            page.click(f'nav a[href="#/{("live", "requests")[number % 2]}"]')
            while time.monotonic() < begun + SOAK_S * number / SAMPLES:
                client.post("/v1/chat/completions", json=body).raise_for_status()
                page.wait_for_timeout(500)
            found.append(heap())
        quarter = SAMPLES // 4
        first, last = sorted(found[:quarter])[quarter // 2], sorted(found[-quarter:])[quarter // 2]
        print(f"heap {first / 1e6:.2f} MB, after {SOAK_S:g} s {last / 1e6:.2f} MB")
        assert last - first < MOST_BYTES, [round(one / 1e6, 2) for one in found]
