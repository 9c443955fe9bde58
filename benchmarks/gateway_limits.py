"""One key's limit, counted by many processes: is it kept under overload, and what happens without Redis?

Two gateways of four workers each, with one Redis and one PostgreSQL, stand before a mock upstream; a key of
1,000 requests per minute is asked for ten times that. Beside it run a key that fails closed and one that
fails open, far from their limits, while Redis is killed, started again empty, stopped (SIGSTOP) and resumed.
`--plain` does the same with eight processes that each hold a RedisLimiter and nothing else. `--cost` measures
the CPU time of a reservation and its settlement: in memory, by our client, and by redis-py.

    python benchmarks/gateway_limits.py [--plain] [--minutes 2] [--limit 1000] [--factor 10] [--json FILE]
    python benchmarks/gateway_limits.py --cost [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import multiprocessing
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gateway import start
from benchmarks.gateway_limits_cost import measure_cost
from ridgeline.gateway.errors import Limited, Unavailable
from ridgeline.gateway.limits.limiter_types import Subject
from ridgeline.gateway.limits.redis_config import RedisConfig
from ridgeline.gateway.limits.redis_limiter import RedisLimiter
from ridgeline.gateway.tenants.keys import Limits
from tests.conftest import free_port
from tests.gateway.services import OwnPostgres, OwnRedis

START_S = 60.0
AWAY_S, BETWEEN_S = 5.0, 4.0
PROBES_PER_S = 20.0  # with the keys that fail closed and open
WIDE = 1_000_000
KEYS = ("overloaded", "closed", "open")
BODY = {"model": "mock_out2", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


class Event(NamedTuple):
    """One request: when it was sent, with which key, what became of it, how long that took."""

    at: float
    key: str
    outcome: str  # admitted, uncounted (served without limits), limited, unavailable, failed
    took_s: float


class Plan(NamedTuple):
    """Requests per second of each key, and times in seconds from the start. Redis is away in between."""

    begin: float  # monotonic, the same for all processes
    overload_s: float
    killed_s: float
    paused_s: float
    end_s: float
    per_s: dict[str, float]


Ask = Callable[[str], Awaitable[str]]


# ---- load ----


async def load(ask: Ask, plan: Plan) -> list[Event]:
    events: list[Event] = []
    running: set[asyncio.Task[None]] = set()

    async def one(key: str) -> None:
        at = time.monotonic()
        try:
            outcome = await ask(key)
        except Exception:
            outcome = "failed"
        events.append(Event(at - plan.begin, key, outcome, time.monotonic() - at))

    async def steadily(key: str) -> None:
        until = plan.overload_s if key == "overloaded" else plan.end_s
        number = 0
        while (due := number / plan.per_s[key]) < until:
            await asyncio.sleep(plan.begin + due - time.monotonic())
            task = asyncio.ensure_future(one(key))
            running.add(task)
            task.add_done_callback(running.discard)
            number += 1

    await asyncio.gather(*(steadily(key) for key in plan.per_s))
    await asyncio.gather(*running)
    return events


async def faults(redis: OwnRedis, plan: Plan) -> dict[str, float]:
    """Redis is killed and starts empty; it is stopped and resumed. When it was there again."""
    back = {}
    await asyncio.sleep(plan.begin + plan.killed_s - time.monotonic())
    redis.stop()
    await asyncio.sleep(AWAY_S)
    redis.start()
    back["killed"] = time.monotonic() - plan.begin
    await asyncio.sleep(plan.begin + plan.paused_s - time.monotonic())
    redis.pause()
    await asyncio.sleep(AWAY_S)
    redis.resume()
    back["stopped"] = time.monotonic() - plan.begin
    return back


# ---- eight limiters, each in its own process ----


def limits_of(key: str, limit: int) -> Limits:
    return Limits(requests_per_minute=limit if key == "overloaded" else WIDE)


def plain_process(url: str, limit: int, plan: Plan, results: Any) -> None:
    async def main() -> None:
        limiter = RedisLimiter(RedisConfig(url=url, prefix="bench"))
        await limiter.start()
        subjects = {key: (Subject("key", key, limits_of(key, limit)),) for key in KEYS}

        async def ask(key: str) -> str:
            try:
                held = await limiter.reserve(subjects[key], 0, 0, "open" if key == "open" else "closed")
            except Limited:
                return "limited"
            except Unavailable:
                return "unavailable"
            limiter.settle(held, 0, 0)
            return "admitted" if held.known else "uncounted"

        results.put(await load(ask, plan))
        await limiter.close()

    asyncio.run(main())


async def run_plain(
    options: argparse.Namespace, stack: ExitStack
) -> tuple[Plan, list[Event], dict[str, float]]:
    redis = OwnRedis()
    stack.callback(redis.stop)
    plan = make_plan(options, time.monotonic() + 5.0)
    share = plan._replace(per_s={key: rate / options.processes for key, rate in plan.per_s.items()})
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=plain_process, args=(redis.url, options.limit, share, results))
        for _ in range(options.processes)
    ]
    for process in processes:
        process.start()
    back = await faults(redis, plan)
    loop = asyncio.get_running_loop()
    parts = [await loop.run_in_executor(None, results.get) for _ in processes]
    for process in processes:
        process.join()
    return plan, [event for part in parts for event in part], back


# ---- two gateways ----


class Gateway(NamedTuple):
    url: str
    admin_url: str
    admin_key: Path


def start_gateway(
    stack: ExitStack, folder: Path, name: str, upstream: str, redis: str, store: str, workers: int
) -> Gateway:
    port, admin, state = free_port(), free_port(), folder / name
    config = folder / f"{name}.toml"
    config.write_text(
        f"""
[gateway]
port = {port}
workers = {workers}
state_dir = "{state}"
log_level = "warning"
drain_s = 2.0
[admin]
port = {admin}
[store]
url = "{store}"
[redis]
url = "{redis}"
[[upstreams]]
name = "mock"
kind = "openai"
url = "{upstream}"
[[models]]
name = "*"
targets = ["mock/*"]
price_in = 1.0
price_out = 2.0
"""
    )
    program = str(Path(sys.executable).parent / "ridgeline")
    start(stack, [program, "gateway", "--config", str(config)], folder)
    return Gateway(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}", state / "admin-key")


def make_key(gateway: Gateway, name: str, limit: int) -> str:
    command = [str(Path(sys.executable).parent / "ridgeline"), "keys", "create", "--name", name, "--json"]
    command += ["--rpm", str(limits_of(name, limit).requests_per_minute)]
    command += ["--when-limits-unknown", "open" if name == "open" else "closed"]
    command += ["--admin-url", gateway.admin_url, "--admin-key-file", str(gateway.admin_key)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    secret: str = json.loads(made.stdout)["secret"]
    return secret


async def run_gateways(
    options: argparse.Namespace, stack: ExitStack
) -> tuple[Plan, list[Event], dict[str, float]]:
    import aiohttp

    folder = Path(tempfile.mkdtemp(prefix="ridgeline-limits-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    redis, postgres = OwnRedis(), OwnPostgres()
    stack.callback(redis.stop)
    stack.callback(postgres.remove)
    port = free_port()
    start(stack, [sys.executable, "-m", "tests.gateway.mock_upstream", "--port", str(port)], folder)
    upstream = f"http://127.0.0.1:{port}"
    gateways = []
    for name in ("first", "second"):
        gateway = start_gateway(stack, folder, name, upstream, redis.url, postgres.url, options.workers)
        gateways.append(gateway)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for gateway in gateways:
            await until_up(session, gateway)
        secrets = {key: make_key(gateways[0], key, options.limit) for key in KEYS}
        await asyncio.sleep(1.5)  # until every worker knows the keys
        turn = [0]

        async def ask(key: str) -> str:
            turn[0] += 1
            url = f"{gateways[turn[0] % len(gateways)].url}/v1/chat/completions"
            headers = {"authorization": f"Bearer {secrets[key]}"}
            async with session.post(url, json=BODY, headers=headers) as answer:
                await answer.read()
                if answer.status == 200:
                    return "admitted" if "x-ratelimit-limit-requests" in answer.headers else "uncounted"
                return {429: "limited", 503: "unavailable"}.get(answer.status, "failed")

        plan = make_plan(options, time.monotonic() + 1.0)
        faulty = asyncio.ensure_future(faults(redis, plan))
        events = await load(ask, plan)
        return plan, events, await faulty


async def until_up(session: Any, gateway: Gateway) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            async with session.get(f"{gateway.url}/health") as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"a gateway did not answer within {START_S:g} s")


# ---- what came of it ----


def make_plan(options: argparse.Namespace, begin: float) -> Plan:
    overload_s = options.minutes * 60.0
    killed_s = overload_s + 1.0
    paused_s = killed_s + AWAY_S + BETWEEN_S
    per_s = {
        "overloaded": options.limit * options.factor / 60.0,
        "closed": PROBES_PER_S,
        "open": PROBES_PER_S,
    }
    return Plan(begin, overload_s, killed_s, paused_s, paused_s + AWAY_S + BETWEEN_S, per_s)


def report(
    options: argparse.Namespace, plan: Plan, events: list[Event], back: dict[str, float]
) -> dict[str, Any]:
    asked = [event for event in events if event.key == "overloaded"]
    admitted = sorted(event.at for event in asked if event.outcome == "admitted")
    minutes = [
        sum(60 * m <= at < 60 * m + 60 for at in admitted) for m in range(max(int(options.minutes), 1))
    ]
    worst = max((bisect.bisect_left(admitted, at + 60.0) - i for i, at in enumerate(admitted)), default=0)
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "set_up": f"{options.processes} limiters"
        if options.plain
        else f"2 gateways x {options.workers} workers",
        "limit": options.limit,
        "asked_per_minute": len(asked) / options.minutes,
        "admitted_by_minute": minutes,
        "most_in_any_60_s": worst,
        "off_percent": max((abs(n / options.limit - 1) * 100 for n in minutes), default=100.0),
        "outcomes": dict(Counter(event.outcome for event in asked)),
        "faults": {},
    }
    print(f"{result['set_up']}, one Redis; a key of {options.limit} requests per minute")
    print(f"  asked per minute     {result['asked_per_minute']:.0f}")
    print(f"  admitted, by minute  {', '.join(map(str, minutes))}   off by {result['off_percent']:.2f} %")
    print(f"  most in any 60 s     {worst}")
    for name, began in (("killed", plan.killed_s), ("stopped", plan.paused_s)):
        result["faults"][name] = fault_report(name, began, back[name], events)
    return result


def fault_report(name: str, began: float, back: float, events: list[Event]) -> dict[str, Any]:
    """The first 50 ms do not count: requests that were under way."""
    found: dict[str, Any] = {}
    print(f"Redis {name} for {back - began:.1f} s")
    for key in ("closed", "open"):
        during = [e for e in events if e.key == key and began + 0.05 <= e.at < back]
        after = sorted(
            e.at + e.took_s for e in events if e.key == key and e.at >= back and e.outcome == "admitted"
        )
        took = sorted(e.took_s for e in during)
        found[key] = {
            "outcomes": dict(Counter(e.outcome for e in during)),
            "median_ms": took[len(took) // 2] * 1000 if took else None,
            "longest_ms": took[-1] * 1000 if took else None,
            "recovered_s": after[0] - back if after else None,
        }
        outcomes = ", ".join(f"{count} {what}" for what, count in found[key]["outcomes"].items())
        again = f"{found[key]['recovered_s']:.2f} s after" if after else "never"
        print(
            f"  key that fails {key:6}  {outcomes}; median {found[key]['median_ms']:.1f} ms, "
            f"longest {found[key]['longest_ms']:.0f} ms; counted again {again}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="limiters in processes, without gateways")
    parser.add_argument("--cost", action="store_true", help="CPU time per reservation, and nothing else")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--limit", type=int, default=1000, help="requests per minute of the key")
    parser.add_argument("--factor", type=float, default=10.0, help="how often that is asked for")
    parser.add_argument("--workers", type=int, default=4, help="of each gateway")
    parser.add_argument("--processes", type=int, default=8, help="with --plain")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cost:
        import uvloop

        result: dict[str, Any] = {"us": uvloop.run(measure_cost())}
    else:
        with ExitStack() as stack:
            work = run_plain if options.plain else run_gateways
            result = report(options, *asyncio.run(work(options, stack)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
