"""How long one tenant's requests are delayed while another sends the gateway the worst inputs we know.

    python benchmarks/gateway_attacks.py [--seconds 5] [--only NAME ...] [--json FILE]

A real gateway process with one worker, before two mock upstreams: one for the attacked tenant, one for the
attacker, so that neither waits for the other there. The attacker runs in another process and sends each input
over four connections at once. The attacked tenant sends one small request after the other; before each attack
it does so for as long without one. The delay of a request is its time less the quiet median. Bar: 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from gateway import free_port, percentile, start, wait_for

BAR_MS = 50.0
CONNECTIONS = 4
GAP_S = 0.002  # between two small requests
SETTLE_S = 1.0  # after an attack, for what was sent to end
LARGE = 7 << 20
CHAT = "/v1/chat/completions"
WORDS = "the quick brown fox jumps over the lazy dog "

Attack = tuple[str, str, bytes]  # path, content type, body


# ---- the inputs ----


def chat(**fields: Any) -> Attack:
    return CHAT, "application/json", json.dumps({"model": "attack", "max_tokens": 1} | fields).encode()


def said(text: str, model: str = "attack") -> Attack:
    return chat(model=model, messages=[{"role": "user", "content": text}])


def numbers(size: int) -> str:
    draw = random.Random(1)
    groups = (draw.choice(("12", "345", "6789", "1", "0301")) + draw.choice(" -./") for _ in range(size))
    return "".join(groups)[:size]


def many_messages(path: str = CHAT, model: str = "attack") -> Attack:
    messages = [{"role": ("user", "assistant")[at % 2], "content": f"m{at}"} for at in range(100_001)]
    return (
        path,
        "application/json",
        json.dumps({"model": model, "max_tokens": 1, "messages": messages}).encode(),
    )


def form(path: str, fields: dict[str, str], content: bytes) -> Attack:
    parts = [
        f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    file = b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    return path, "multipart/form-data; boundary=x", b"".join([*parts, file, content, b"\r\n--x--\r\n"])


def batch_file(size: int) -> Attack:
    body = {"model": "attack", "messages": [{"role": "user", "content": WORDS * 40}]}
    line = json.dumps({"custom_id": "c", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"
    return form("/v1/files", {"purpose": "batch"}, line * (size // len(line)))


def nested(depth: int) -> Attack:
    return CHAT, "application/json", b'{"model":"attack","messages":' + b"[" * depth + b"]" * depth + b"}"


def small_fields() -> Attack:
    return chat(**{f"f{at}": at for at in range(LARGE // 16)})


def tool_schemas() -> Attack:
    properties = {f"p{at}": {"type": "string", "description": WORDS} for at in range(LARGE // 90)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    return chat(messages=[{"role": "user", "content": "hi"}], tools=[tool])


def input_items() -> Attack:
    items = [{"type": "message", "role": "user", "id": f"m{at}", "content": "x"} for at in range(90_000)]
    return "/v1/responses", "application/json", json.dumps({"model": "attack", "input": items}).encode()


def embeddings() -> Attack:
    body = {"model": "attack", "input": ["a text"] * (LARGE // 10)}
    return "/v1/embeddings", "application/json", json.dumps(body).encode()


# By name: the key that sends it, and the input.
ATTACKS: dict[str, tuple[str, Callable[[], Attack]]] = {
    "190 MB batch file": ("plain", lambda: batch_file(190 << 20)),
    "190 MB batch file, guarded": ("guarded", lambda: batch_file(190 << 20)),
    "31 kB of numbers, guarded": ("guarded", lambda: said(numbers(31_000))),
    "31 kB of digits and brackets, guarded": ("guarded", lambda: said("1(" * 15_500)),
    "2 kB of digits and brackets, guarded": ("guarded", lambda: said("1(" * 1_000)),
    "7 MB of addresses, guarded": ("guarded", lambda: said("me@example.com " * (LARGE // 15))),
    "100,000 messages": ("plain", many_messages),
    "100,000 messages, guarded": ("guarded", many_messages),
    "100,000 messages, translated": ("plain", lambda: many_messages("/v1/messages")),
    "100,000 messages, routed": ("plain", lambda: many_messages(model="route")),
    "900 levels": ("plain", lambda: nested(900)),
    "3 million levels": ("plain", lambda: nested(3_000_000)),
    "7 MB string": ("plain", lambda: said(WORDS * (LARGE // len(WORDS)))),
    "7 MB string, routed": ("plain", lambda: said(WORDS * (LARGE // len(WORDS)), "route")),
    "450,000 fields": ("plain", small_fields),
    "7 MB of tool schemas": ("plain", tool_schemas),
    "90,000 input items": ("plain", input_items),
    "700,000 texts to embed": ("plain", embeddings),
    "100 MB of audio": (
        "plain",
        lambda: form("/v1/audio/transcriptions", {"model": "attack"}, b"RIFF" + bytes(100 << 20)),
    ),
}


# ---- the attacker, in another process ----


async def attack(name: str, port: int, secret: str, seconds: float) -> dict[str, Any]:
    path, content_type, body = ATTACKS[name][1]()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\nconnection: close\r\n"
        f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    statuses: dict[str, int] = {}
    until = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < until:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.writelines((head, body))
                answer = await asyncio.wait_for(reader.read(64), 120)
                status = answer[9:12].decode() or "closed"
            except (ConnectionError, TimeoutError):
                status = "reset"
            writer.close()
            statuses[status] = statuses.get(status, 0) + 1

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return {"bytes": len(body), "statuses": statuses}


# ---- the attacked tenant ----


async def latencies(port: int, secret: str, stop: Callable[[], bool]) -> list[float]:
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    request = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    taken: list[float] = []
    while not stop():
        began = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the attacked tenant was refused: {head[:200]!r}")
        length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        taken.append(time.perf_counter() - began)
        await asyncio.sleep(GAP_S)
    writer.close()
    return taken


async def measure(name: str, port: int, keys: dict[str, str], seconds: float) -> dict[str, Any]:
    until = time.monotonic() + seconds
    quiet = await latencies(port, keys["small"], lambda: time.monotonic() >= until)
    secret = keys[ATTACKS[name][0]]
    command = [sys.executable, __file__, "--attack", name, "--port", str(port), "--secret", secret]
    attacker = subprocess.Popen([*command, "--seconds", str(seconds)], stdout=subprocess.PIPE)
    during = await latencies(port, keys["small"], lambda: attacker.poll() is not None)
    assert attacker.stdout is not None
    sent = json.loads(attacker.stdout.read() or b"{}")
    await asyncio.sleep(SETTLE_S)
    usual = percentile(quiet, 0.5)
    return {
        **sent,
        "requests": len(during),
        "quiet_p50_ms": usual * 1e3,
        "quiet_worst_delay_ms": (max(quiet) - usual) * 1e3,
        "p50_ms": percentile(during, 0.5) * 1e3,
        "p99_ms": percentile(during, 0.99) * 1e3,
        "worst_delay_ms": (max(during) - usual) * 1e3,
    }


# ---- the gateway ----

CONFIG = """
[gateway]
port = {port}
state_dir = "{folder}/state"
log_level = "error"
objects_upstream = "hosted"
[admin]
port = {admin}
[observe]
access_log = "off"
[[upstreams]]
name = "mock"
kind = "ridgeline"
url = "http://127.0.0.1:{small}"
[[upstreams]]
name = "hosted"
kind = "openai"
url = "http://127.0.0.1:{large}"
[[models]]
name = "small"
targets = ["mock/mock"]
[[models]]
name = "attack"
targets = ["hosted/mock"]
[[routes]]
name = "route"
models = ["attack"]
[[guards]]
name = "strict"
timeout_ms = 10000
"""


def start_gateway(stack: ExitStack, folder: Path) -> tuple[int, dict[str, str]]:
    import httpx

    ports = {name: free_port() for name in ("port", "admin", "small", "large")}
    for name in ("small", "large"):
        command = [sys.executable, "-m", "tests.gateway.mock_upstream", "--port", str(ports[name])]
        start(stack, command, folder)
    config = folder / "gateway.toml"
    config.write_text(CONFIG.format(folder=folder, **ports))
    program = str(Path(sys.executable).parent / "ridgeline")
    process = start(stack, [program, "gateway", "--config", str(config)], folder)
    wait_for(f"http://127.0.0.1:{ports['port']}/health", "none", process)
    admin_key = (folder / "state" / "admin-key").read_text().strip()
    keys = {}
    for name, guard in (("small", ""), ("plain", ""), ("guarded", "strict")):
        made = httpx.post(
            f"http://127.0.0.1:{ports['admin']}/admin/keys",
            json={"name": name, "guard": guard},
            headers={"authorization": f"Bearer {admin_key}"},
        )
        keys[name] = made.raise_for_status().json()["secret"]
    time.sleep(2.0)  # until the worker knows the keys and its processes have started
    return ports["port"], keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack, and of quiet before it")
    parser.add_argument("--only", nargs="*", help="names of attacks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--secret", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        told = asyncio.run(attack(arguments.attack, arguments.port, arguments.secret, arguments.seconds))
        print(json.dumps(told))
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port, keys = start_gateway(stack, Path(folder))
        print(
            f"{'attack':<40}{'quiet p50':>10}{'quiet worst':>12}{'p50':>8}{'p99':>8}{'worst':>8}  ms; answers"
        )
        for name in arguments.only or ATTACKS:
            found = results[name] = asyncio.run(measure(name, port, keys, arguments.seconds))
            figures = ("quiet_p50_ms", "quiet_worst_delay_ms", "p50_ms", "p99_ms", "worst_delay_ms")
            widths = (10, 12, 8, 8, 8)
            row = "".join(f"{found[one]:>{width}.1f}" for one, width in zip(figures, widths, strict=True))
            print(f"{name:<40}{row}  {found.get('statuses')}", flush=True)
    worst = max(results, key=lambda name: results[name]["worst_delay_ms"])
    delay_ms = results[worst]["worst_delay_ms"]
    print(f"worst delay: {delay_ms:.1f} ms ({worst}); {delay_ms / BAR_MS:.2f} of the bar of {BAR_MS:g} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
