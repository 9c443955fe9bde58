"""The console's bars: size, speed, cost and survival, in a real browser over a real server.

    python benchmarks/console.py [--only size,paint,reply,timeline,tab,tabs,killed] [--json FILE]

size      gzip of every file, of the first view, own lines (bars: 150 kB, 60 kB, 3,000)
paint     first contentful paint of a new browser context on loopback (bar: 300 ms)
reply     10,000 tokens at 300 tok/s into Chat: the longest gap between two frames (bar: 50 ms)
timeline  2,000 requests in sight: frames per second, and the time to lay out and draw one frame (bar: 60 fps)
tab       one open stream, and 100: CPU of the server beyond its own, bytes (bars: 0.2 % of a core, 3 kB/s)
tabs      TPOT of one stream with 100 open streams and without, in turn (bar: 1 % more)
killed    SIGKILL of the engine in the middle of an answer: time until the page says so (bar: 2 s)

Needs a Chromium (`.ci/services` installs it). The last three start `ridgeline serve smollm2-135m`. Other work
on the machine shows in every figure but the size: run it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx

from ridgeline.console.assets import STATIC, assets
from ridgeline.engine.client.output import OutputChunk
from tests.conftest import LiveServer, await_ready, start_server
from tests.console.browser import launched, tab_of
from tests.console.threaded_stage import serving
from tests.server.scripted_client import last_chunk
from tests.server.stage import Stage

TOKENS, RATE = 10_000, 300
FRAMES = """() => {
  window.gaps = [];
  window.tasks = []; // those of the page that took more than 50 ms
  new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((one) => one.duration)))
    .observe({ type: "longtask" });
  let last = performance.now();
  const frame = (now) => {
    window.gaps.push(now - last);
    last = now;
    window.frame = requestAnimationFrame(frame);
  };
  window.frame = requestAnimationFrame(frame);
}"""
RECORDS = """async (count) => {
  const { feed } = await import("console/events.js");
  const begin = Date.now();
  const records = Array.from({ length: count }, (_, n) => ({
    id: `r${n}`, model: "m", path: "/v1/chat/completions", at: begin - 110_000 + (n * 110_000) / count,
    state: "done", prompt: 500, out: 100, admitted: 20, chunks: [20, 80, 140],
    first: 200, last: 1900, end: 1901, sent: 1902,
  }));
  feed.hear({ event: "requests.snapshot", id: "", data: JSON.stringify(records) });
}"""
DRAW = """async () => {
  const { drawTimeline, layout } = await import("console/pages/timeline.js");
  const now = Date.now(), canvas = document.querySelector("canvas"), records = [];
  for (let n = 0; n < 2000; n++) records.push({ id: `r${n}`, at: now - 110_000 + n * 55, state: "done",
    admitted: 20, chunks: [20, 80, 140], first: 200, last: 1900, end: 1901, sent: 1902 });
  const times = [];
  for (let turn = 0; turn < 60; turn++) {
    const begin = performance.now();
    drawTimeline(canvas, layout(records, now - 120_000, now), now - 120_000, now, null);
    times.push(performance.now() - begin);
  }
  return times;
}"""
STREAMS = """
import asyncio, sys
async def read(host, port):
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /console/events?topics=metrics,requests HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
    while await reader.read(65536):
        pass
async def main(host, port, count):
    await asyncio.gather(*(read(host, port) for _ in range(count)))
asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def shown(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def size() -> dict[str, Any]:
    files = assets()
    own = [*STATIC.glob("*.js"), *STATIC.glob("pages/*.js"), *STATIC.glob("*.css")]
    return {
        "all_kb": round(sum(len(one.packed) for one in files.by_name.values()) / 1000, 1),
        "first_view_kb": round(sum(len(one.packed) for one in files.first_view()) / 1000, 1),
        "own_lines": sum(len(path.read_text().splitlines()) for path in own),
    }


def at_rate(tokens: int, rate: float) -> Any:
    """A script of the stage: Markdown, a word a token, by the clock, so that a late one is made up for."""
    words = ["lorem ", "**bold** ", "ipsum ", "`code` ", "dolor ", "sit ", "amet.\n\n", "- item "]

    async def script(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        begun = time.monotonic()
        for number in range(tokens):
            await asyncio.sleep(max(begun + number / rate - time.monotonic(), 0))
            yield OutputChunk(0, words[number % len(words)], [number % 200], [])
        yield last_chunk(0, prompt, tokens)

    return script


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.wait_for_selector(".composer select option", state="attached")
    page.press("#prompt", "Enter")


def paint(rounds: int) -> dict[str, Any]:
    script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    found: list[float] = []
    with launched() as browser, serving(lambda: Stage(script=at_rate(5, 100))) as (url, _):
        for _ in range(rounds + 1):
            with tab_of(browser, url) as opened:
                page = opened.open()
                page.wait_for_selector(".empty")
                while (at := page.evaluate(script)) is None:
                    page.wait_for_timeout(20)
                found.append(at)
    return {"first_contentful_paint_ms": found[1:]}  # the first one starts the browser's own parts


def reply(rounds: int) -> dict[str, Any]:
    longest, late, rates, tasks, shares = [], [], [], [], []
    with launched() as browser, serving(lambda: Stage(script=at_rate(TOKENS, RATE))) as (url, _):
        for _ in range(rounds):
            with tab_of(browser, url) as opened:
                page = opened.open()
                page.set_default_timeout(240_000)
                page.wait_for_selector(".composer select option", state="attached")
                page.get_by_role("button", name="Settings").click()
                page.get_by_label("Max tokens").fill(str(TOKENS))
                page.get_by_role("button", name="Close settings").click()
                send(page, "ten thousand tokens")
                page.wait_for_selector(".reply[data-state=streaming]")
                page.evaluate(FRAMES)
                session = page.context.new_cdp_session(page)
                session.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU, not waiting for it
                before = session.send("Performance.getMetrics")["metrics"]
                begun = time.monotonic()
                page.wait_for_selector(".reply[data-state=done]")
                rates.append(TOKENS / (time.monotonic() - begun))
                after = session.send("Performance.getMetrics")["metrics"]
                used = {
                    one["name"]: one["value"] - two["value"] for one, two in zip(after, before, strict=True)
                }
                shares.append(100 * used["TaskDuration"] / (time.monotonic() - begun))
                tasks.append(page.evaluate("Math.max(0, ...window.tasks)"))
                gaps = page.evaluate("(cancelAnimationFrame(window.frame), window.gaps)")
                longest.append(max(gaps))
                late.append(sum(gap > 50 for gap in gaps))
    return {
        "longest_gap_ms": longest,
        "gaps_over_50_ms": late,
        "longest_task_ms": tasks,
        "main_thread_percent": shares,
        "tokens_per_s": rates,
    }


def timeline(rounds: int) -> dict[str, Any]:
    rates, draws = [], []
    with (
        launched() as browser,
        serving(lambda: Stage(script=at_rate(5, 100))) as (url, _),
        tab_of(browser, url) as opened,
    ):
        page = opened.open("#/requests")
        page.wait_for_selector(".timeline")
        page.wait_for_selector(".connection[data-state=live]")
        page.evaluate(RECORDS, 2000)
        page.wait_for_selector("tbody tr")
        for _ in range(rounds):
            page.evaluate(FRAMES)
            page.wait_for_timeout(4000)
            gaps = page.evaluate("(cancelAnimationFrame(window.frame), window.gaps)")
            rates.append(1000 * len(gaps) / sum(gaps))
            draws.append(statistics.median(page.evaluate(DRAW)))
    return {"frames_per_s": rates, "layout_and_draw_ms": draws}


@contextmanager
def real_server() -> Iterator[LiveServer]:
    with tempfile.TemporaryDirectory() as folder:
        # Without drafts: their luck changes the TPOT more than any stream does.
        flags = ("--kv-tokens", "16384", "--speculate", "off")
        made = start_server(Path(folder) / "server.log", *flags)
        try:
            await_ready(made)
            yield made
        finally:
            made.process.terminate()
            made.process.wait()


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_s(pid: int) -> float:
    """Of a process and its children, from the scheduler's books, in nanoseconds there."""
    total = 0
    for one in (pid, *children(pid)):
        for task in Path(f"/proc/{one}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def read_stream(url: str, seconds: float) -> int:
    """The bytes of one open stream in this time, without its first ones: the snapshot."""
    size, begun = 0, time.monotonic()
    with httpx.stream("GET", f"{url}/console/events?topics=metrics,requests", timeout=60) as answer:
        for piece in answer.iter_raw():
            if time.monotonic() - begun > 0.5:
                size += len(piece)
            if time.monotonic() - begun > seconds:
                return size
    return size


@contextmanager
def open_streams(url: str, count: int) -> Iterator[None]:
    host, port = re.fullmatch(r"http://(.+):(\d+)", url).groups()  # type: ignore[union-attr]
    readers = subprocess.Popen([sys.executable, "-c", STREAMS, host, port, str(count)])
    try:
        time.sleep(2)
        yield
    finally:
        readers.kill()
        readers.wait()
        time.sleep(1)


def tab(rounds: int, seconds: float = 10.0) -> dict[str, Any]:
    one, hundred, rates, rates_busy = [], [], [], []
    with real_server() as server:
        pid, url = server.process.pid, server.base_url
        time.sleep(10)

        def percent(work: Callable[[], Any]) -> float:
            before, begun = cpu_s(pid), time.monotonic()
            work()
            return 100 * (cpu_s(pid) - before) / (time.monotonic() - begun)

        for _ in range(rounds):
            idle = percent(lambda: time.sleep(seconds))
            one.append(percent(lambda: rates.append(read_stream(url, seconds) / seconds / 1000)) - idle)
            with open_streams(url, 100):
                hundred.append(percent(lambda: time.sleep(seconds)) - idle)
            busy = threading.Thread(target=tpot_ms, args=(url, 600))
            busy.start()
            rates_busy.append(read_stream(url, 5) / 5 / 1000)
            busy.join()
    return {
        "cpu_percent_of_a_core": one,
        "cpu_percent_with_100": hundred,
        "kb_per_s_idle": rates,
        "kb_per_s_busy": rates_busy,
    }


def tpot_ms(url: str, tokens: int = 192) -> float:
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Tell a long story about a ridge."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "include_timing": True,
        "temperature": 0,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return float(answer["usage"]["timing"][0]["tpot_ms"])


def tabs(rounds: int, count: int = 100) -> dict[str, Any]:
    alone, beside = [], []
    with real_server() as server:
        tpot_ms(server.base_url)
        for _ in range(rounds):
            alone.append(tpot_ms(server.base_url))
            with open_streams(server.base_url, count):
                beside.append(tpot_ms(server.base_url))
    ratios = [with_tabs / without for with_tabs, without in zip(beside, alone, strict=True)]
    return {"tpot_alone_ms": alone, f"tpot_with_{count}_ms": beside, "ratio": ratios}


def killed(rounds: int) -> dict[str, Any]:
    told = []
    for _ in range(rounds):
        with real_server() as server, launched() as browser, tab_of(browser, server.base_url) as opened:
            page = opened.open()
            send(page, "Tell a long story about a ridge and the river below it.")
            page.wait_for_selector(".reply[data-state=streaming]")
            engine = [one for one in children(server.process.pid) if b"engine" in _command(one)][-1]
            begun = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            page.wait_for_selector(".reply[data-state=failed] .notice")
            told.append(time.monotonic() - begun)
    return {"told_after_s": told}


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of measurements, comma-separated (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement (default: 3 to 9)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    measurements: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
        "size": (lambda _: size(), 1),
        "paint": (paint, 9),
        "reply": (reply, 3),
        "timeline": (timeline, 3),
        "tab": (tab, 3),
        "tabs": (tabs, 9),
        "killed": (killed, 3),
    }
    names = arguments.only.split(",") if arguments.only else list(measurements)
    if unknown := [name for name in names if name not in measurements]:
        parser.error(f"--only: {unknown[0]!r} is unknown; known: {', '.join(measurements)}")
    report: dict[str, Any] = {}
    for name in names:
        measure, rounds = measurements[name]
        report[name] = measure(arguments.rounds or rounds)
        for figure, values in report[name].items():
            text = shown(values, 3 if "ratio" in figure else 2) if isinstance(values, list) else str(values)
            print(f"{name:<10}{figure:<32}{text}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
