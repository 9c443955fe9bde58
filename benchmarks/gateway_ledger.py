"""Is the ledger exact? Its rows beside the books of the upstream that computed, request by request.

    python benchmarks/gateway_ledger.py [--requests 20000] [--clients 32] [--away 60] [--sqlite] [--json FILE]
    python benchmarks/gateway_ledger.py --kind openai …

Requests of every kind go through `ridgeline gateway` to a mock upstream that counts its tokens: chat,
completions, responses, messages, embeddings and rerank; whole and streamed; answered, left by their client,
refused, failed, broken off by the upstream, retried, from the cache. Meanwhile a worker is killed (-9), then
the whole gateway is killed and started again, and PostgreSQL is stopped for --away seconds. In the end every
request that the upstream knows must have one row with the same tokens, every answer that a client saw must
have its row, and rows that the upstream knows nothing of must have cost nothing. Prints a table, writes JSON;
exit code 1 where one token differs.

With --kind openai the upstream is a hosted one: it cannot be asked afterwards, and some answers say nothing
of their usage. Then dollars are compared: how many are missing from the ledger, and how many of these in
requests without a row marked `estimated`. Exit code 1 where a dollar is missing or too much and not marked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gateway_ledger_books import compare, compare_dollars, show, show_dollars  # noqa: E402
from ridgeline.gateway.accounting.store.places import JOURNALS, store_at  # noqa: E402
from ridgeline.gateway.accounting.store.reports import Reports  # noqa: E402
from ridgeline.gateway.accounting.store.schema import TABLE  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.gateway.services import OwnPostgres, OwnRedis  # noqa: E402

START_S = 60.0
SETTLE_S = 180.0

CONFIG = """
[gateway]
port = {port}
workers = {workers}
state_dir = "{state}"
log_level = "error"
[admin]
port = {admin}
[store]
url = "{store}"
[redis]
url = "{redis}"
[ledger]
takeover_s = 0.5
[retries]
breaker_failures = 1000000
backoff_ms = 20
budget_ratio = 1.0
[[upstreams]]
name = "mock"
kind = "{kind}"
url = "{upstream}"
max_concurrent = 1024
[[models]]
name = "*"
targets = ["mock/*"]
price_in = 1.0
price_cached = 0.1
price_out = 2.0
"""

TEXT = "Tell me about the rivers of the north and of the south, and where they end. "
KINDS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "completions": ("/v1/completions", lambda text: {"prompt": text}),
    "responses": ("/v1/responses", lambda text: {"input": text, "store": False}),
    "messages": (
        "/v1/messages",
        lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 100},
    ),
    "embeddings": ("/v1/embeddings", lambda text: {"input": text}),
    "rerank": ("/v1/rerank", lambda text: {"query": text, "documents": [text, "another"]}),
}
# What becomes of a request, how often, and the upstream's part in it.
FATES: dict[str, tuple[int, str]] = {
    "answered": (40, "mock_out{n}_cached{c}"),
    "slow": (10, "mock_out{n}_pace2_late5_reason3"),
    "left": (20, "mock_out60_pace4_cached{c}"),  # the client leaves in the middle
    "cached": (10, "mock_out12_fixed"),  # the same question again and again, with the cache on
    "failed": (5, "mock_fail503"),
    "refused": (5, "mock_fail400"),
    "broken": (5, "mock_out30_cut{n}"),
    "retried": (5, "mock_out9_flaky4"),
}


# With --kind openai, besides.
HOSTED_FATES: dict[str, tuple[int, str]] = {
    "silent": (10, "mock_out{n}_silent"),  # no usage in the answer
    "given up": (5, "mock_out20_late{n}00"),  # the client leaves before the answer begins
}


class Gateway:
    """`ridgeline gateway` as a process that may be killed and started again."""

    def __init__(self, folder: Path, config: Path, port: int, admin: int) -> None:
        self._folder, self._config, self.port, self._admin = folder, config, port, admin
        self._program = str(Path(sys.executable).parent / "ridgeline")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        log = (self._folder / "gateway.log").open("ab")
        self._process = subprocess.Popen(
            [self._program, "gateway", "--config", str(self._config)], stdout=log, stderr=log, cwd=ROOT
        )
        until = time.monotonic() + START_S
        while not _answers(f"{self.url}/health"):
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit((self._folder / "gateway.log").read_text()[-2000:])
            time.sleep(0.05)

    def make_key(self) -> str:
        state = self._folder / "state"
        command = [self._program, "keys", "create", "--name", "bench", "--json"]
        command += ["--admin-url", f"http://127.0.0.1:{self._admin}"]
        command += ["--admin-key-file", str(state / "admin-key")]
        made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        time.sleep(1.0)  # until every worker knows it
        return str(json.loads(made.stdout)["secret"])

    def workers(self) -> list[int]:
        assert self._process is not None
        found = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in found.split()]

    def kill_worker(self) -> None:
        os.kill(self.workers()[0], signal.SIGKILL)

    def kill(self) -> None:
        """All of it, as when the machine's memory runs out."""
        assert self._process is not None
        for pid in [self._process.pid, *self.workers()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


class Clients:
    """Many at once; each notes the id of every answer that it saw the head of."""

    def __init__(self, gateway: Gateway, key: str, count: int, seed: int, hosted: bool = False) -> None:
        self._gateway, self._key = gateway, key
        self._fates = FATES | HOSTED_FATES if hosted else FATES
        self._left = iter(range(count))
        self._draw = random.Random(seed)
        self.begun = 0
        self.seen: dict[str, str] = {}  # request id → fate
        self.ends: Counter[str] = Counter()

    async def run(self, clients: int) -> None:
        limit = aiohttp.TCPConnector(limit=0)
        patience = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=limit, timeout=patience) as session:
            await asyncio.gather(*(self._client(session) for _ in range(clients)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        for _ in self._left:
            self.begun += 1
            fate = self._draw.choices(list(self._fates), [share for share, _ in self._fates.values()])[0]
            try:
                await self._ask(session, fate)
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                self.ends["cut off"] += 1
                await asyncio.sleep(0.2)  # the gateway is dead or starts

    async def _ask(self, session: aiohttp.ClientSession, fate: str) -> None:
        draw = self._draw
        kinds = list(KINDS) if fate not in ("left", "slow", "broken") else list(KINDS)[:4]
        kind = draw.choice(kinds)
        path, body_of = KINDS[kind]
        model = self._fates[fate][1].format(n=draw.randrange(1, 25), c=draw.randrange(10))
        text = TEXT if fate == "cached" else TEXT * draw.randrange(1, 4) + str(draw.random())
        body = body_of(text) | {"model": model}
        if kind not in ("embeddings", "rerank") and draw.random() < 0.5:
            body["stream"] = True
            if kind in ("chat", "completions") and draw.random() < 0.3:
                body["stream_options"] = {"include_usage": True}
        headers = {"authorization": f"Bearer {self._key}"}
        if fate == "cached":
            headers["x-ridgeline-cache"] = "exact"
        leave_s = draw.uniform(0.0, 0.25) if fate in ("left", "given up") else None
        asked = session.post(f"{self._gateway.url}{path}", json=body, headers=headers)
        try:
            async with asyncio.timeout(leave_s), asked as answer:
                self.seen[answer.headers.get("x-request-id", "")] = fate
                async for _ in answer.content.iter_any():
                    pass
                self.ends[f"{answer.status}"] += 1
        except TimeoutError:
            if leave_s is None:
                raise
            self.ends["left"] += 1


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    mock = subprocess.Popen(
        [sys.executable, "-m", "tests.gateway.mock_upstream"], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert mock.stdout is not None
    upstream = mock.stdout.readline().decode().strip()
    postgres = None if args.sqlite else OwnPostgres()
    redis = OwnRedis() if args.workers > 1 else None
    port, admin = free_port(), free_port()
    config = folder / "gateway.toml"
    config.write_text(
        CONFIG.format(
            port=port,
            admin=admin,
            state=folder / "state",
            store=postgres.url if postgres is not None else "",
            upstream=upstream,
            kind=args.kind,
            workers=args.workers,
            redis=redis.url if redis is not None else "",
        )
    )
    gateway = Gateway(folder, config, port, admin)
    try:
        gateway.start()
        key = gateway.make_key()
        clients = Clients(gateway, key, args.requests, args.seed, args.kind != "ridgeline")
        began = time.monotonic()
        await asyncio.gather(clients.run(args.clients), disturb(args, clients, gateway, postgres))
        took_s = time.monotonic() - began
        store_url = postgres.url if postgres is not None else ""
        books = _json(f"{upstream}/mock/books")
        rows = await asyncio.to_thread(settled, store_url, folder / "state", books["books"], clients.seen)
        books = _json(f"{upstream}/mock/books")
        result = compare(books["books"], rows, clients.seen, clients.ends)
        if args.kind != "ridgeline":
            result |= compare_dollars(books, rows)
        result |= {"seconds": took_s, "requests": clients.begun, "still_running": books["running"]}
        gateway.stop()
        return result
    finally:
        with contextlib.suppress(Exception):
            gateway.kill()
        mock.terminate()
        mock.wait()
        if postgres is not None:
            postgres.remove()
        if redis is not None:
            redis.stop()


async def disturb(
    args: argparse.Namespace, clients: Clients, gateway: Gateway, postgres: OwnPostgres | None
) -> None:
    async def at(share: float) -> None:
        while clients.begun < share * args.requests:
            await asyncio.sleep(0.02)

    if args.calm:
        return
    await at(0.2)
    say("a worker is killed (-9)")
    gateway.kill_worker()
    await at(0.4)
    say("the gateway is killed (-9) and started again")
    gateway.kill()
    await asyncio.to_thread(gateway.start)
    if postgres is not None:
        await at(0.6)
        say(f"PostgreSQL is stopped for {args.away:g} s")
        await asyncio.to_thread(postgres.stop)
        await asyncio.sleep(args.away)
        await asyncio.to_thread(postgres.start)
        say("PostgreSQL is back")


def settled(
    store_url: str, state_dir: Path, books: dict[str, Any], seen: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """The table, once it has a row for everything, or after a while."""
    store = store_at(store_url, state_dir, 30.0)
    reports = Reports(store, state_dir / JOURNALS)
    wanted = (set(books) | set(seen)) - {""}
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        have = {row[0] for row in store.query(f"SELECT request_id FROM {TABLE}")}
        if wanted <= have and not reports.waiting():
            break
        time.sleep(0.5)
    names = "request_id, outcome, endpoint, stream, status, usage_source, price_source, cost_pusd, "
    names += "tokens_in, tokens_cached, tokens_out, tokens_reasoning"
    keys = names.split(", ")
    found = [dict(zip(keys, row, strict=True)) for row in store.query(f"SELECT {names} FROM {TABLE}")]
    store.close()
    assert len(found) == len({row["request_id"] for row in found})
    return {row["request_id"]: row for row in found}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def say(text: str) -> None:
    print(f"… {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--away", type=float, default=60.0, help="seconds without PostgreSQL")
    parser.add_argument("--workers", type=int, default=1, help="more than one count together through Redis")
    parser.add_argument("--kind", choices=["ridgeline", "openai"], default="ridgeline")
    parser.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    parser.add_argument("--calm", action="store_true", help="nothing is killed or stopped")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave the gateway's state in this folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="ridgeline-ledger-")
        folder = args.keep or Path(stack.enter_context(made))
        folder.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(measure(args, folder))
    hosted = args.kind != "ridgeline"
    (show_dollars if hosted else show)(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2))
    is_right = result["is_marked"] and not result["seen_without_row"] if hosted else result["is_exact"]
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
