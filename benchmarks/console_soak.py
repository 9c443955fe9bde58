"""The heap of an open console over a real server, sampled after forced collections (bar: slope 0).

    python benchmarks/console_soak.py [--seconds 3600] [--json FILE]

Live, Requests and Chat are opened in turn, with a new conversation each time. The bounded lists (300
frames, 2,000 requests) are full at the start, so growth up to a bound is not counted. Needs a Chromium
(`.ci/services` installs it); light enough to run beside other work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import await_ready, start_server
from tests.console.browser import launched, tab_of
from tests.console.test_soak import FILL

TURNS = 5  # between two samples


def shown(page: Any, selector: str, **state: Any) -> None:
    """Wait for it. wait_for_selector would return a handle, which keeps nodes that have left the page."""
    page.locator(selector).first.wait_for(**state)


def one_turn(page: Any, number: int) -> None:
    page.click('nav a[href="#/chat"]')
    shown(page, ".composer select option", state="attached")
    fresh = page.get_by_role("button", name="New chat")
    if fresh.is_enabled():
        fresh.click()
    page.fill("#prompt", f"Name {number} hills.")
    page.press("#prompt", "Enter")
    shown(page, ".reply[data-state=done]")
    page.click('nav a[href="#/requests"]')
    shown(page, ".timeline")
    page.wait_for_timeout(6000)
    page.click('nav a[href="#/live"]')
    shown(page, ".model-grid")
    page.wait_for_timeout(12_000)


def sample(session: Any) -> dict[str, float]:
    for _ in range(2):
        session.send("HeapProfiler.collectGarbage")
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    heap = session.send("Runtime.getHeapUsage")["usedSize"]
    return {"heap_mb": heap / 1e6, "nodes": metrics["Nodes"], "listeners": metrics["JSEventListeners"]}


def soak(seconds: float, kept: Path | None) -> list[dict[str, float]]:
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "server.log", "--kv-tokens", "16384")
        try:
            await_ready(server)
            with launched() as browser, tab_of(browser, server.base_url) as tab:
                page = tab.open("#/live")
                page.set_default_timeout(240_000)
                shown(page, ".model-grid")
                page.evaluate(FILL)
                session = page.context.new_cdp_session(page)
                session.send("Performance.enable")
                begun, turn = time.monotonic(), 0
                while time.monotonic() - begun < seconds:
                    turn += 1
                    one_turn(page, turn)
                    if turn % TURNS == 0:
                        samples.append({"s": time.monotonic() - begun, "turns": turn, **sample(session)})
                        print(
                            "  ".join(f"{name} {value:.2f}" for name, value in samples[-1].items()),
                            flush=True,
                        )
                        if kept:
                            kept.write_text(json.dumps(samples, indent=1))
        finally:
            server.process.terminate()
            server.process.wait()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--json", type=Path, help="write the samples to this file")
    arguments = parser.parse_args()
    samples = soak(arguments.seconds, arguments.json)
    half = samples[len(samples) // 2 :]  # the first half warms up: compiled code, caches
    if len(half) > 2:
        fit = statistics.linear_regression(
            [one["s"] / 3600 for one in half], [one["heap_mb"] for one in half]
        )
        print(f"slope of the second half: {fit.slope:+.2f} MB an hour, of {half[0]['heap_mb']:.2f} MB")


if __name__ == "__main__":
    main()
