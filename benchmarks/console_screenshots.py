"""Takes the console's pictures in docs/figures/console: a real server, gateway and fleet in a real browser.

    python benchmarks/console_screenshots.py [--only server,gateway,fleet] [--out DIR] [--every DIR]

Needs Debian's chromium-headless-shell; with the packages fonts-inter and fonts-jetbrains-mono the pictures
have the fonts that the page prefers. The figures on them are those of this machine and moment; the gateway's
ledger is an example, made from a seed. --every writes all pages in both themes at 360, 768 and 1440 px.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.store.places import sqlite_ledger
from tests.console.browser import launched
from tests.ports import free_port

ROOT = Path(__file__).parents[1]
SIZES = {"desk": (1280, 800), "wide": (1440, 900), "tablet": (768, 1024), "phone": (360, 760)}
MOST_BYTES = 150_000
MODEL = "smollm2-135m"
WAVES = 6  # of requests before Live's picture, for a chart with a past
QUESTION = "Explain in three sentences why decoding is limited by memory bandwidth."


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline.cli.main", *command], stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def until_ready(url: str, process: subprocess.Popen[bytes], token: str = "", limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    headers = {"authorization": f"Bearer {token}"} if token else {}
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the process for {url} ended with {process.returncode}")
        try:
            urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=2).close()
            return
        except OSError:
            time.sleep(0.3)
    raise SystemExit(f"{url} did not answer within {limit_s:g} s")


def call(url: str, body: Any = None, key: str = "", timeout: float = 300.0) -> Any:
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
        return json.load(answer)


def ask(url: str, text: str, tokens: int, key: str = "", model: str = MODEL, timeout: float = 300.0) -> None:
    message = {"role": "user", "content": text}
    body = {"model": model, "messages": [message], "max_tokens": tokens, "ignore_eos": True}
    with contextlib.suppress(TimeoutError):  # a client that leaves
        call(f"{url}/v1/chat/completions", body, key, timeout)


def traffic(url: str, key: str = "", model: str = MODEL) -> list[threading.Thread]:
    """Requests that overlap: short and long prompts, shared beginnings, one whose client leaves."""
    shared = "The ridge line above the valley was long and the path on it narrow. " * 25
    plan = [(0.0, shared + "First part?", 90), (0.4, "Name a river.", 60), (0.9, shared + "Second part?", 90)]
    plan += [(1.5, "Write a poem.", 120), (2.2, shared + "Third part?", 60), (3.0, "List ten hills.", 90)]

    def send(pause: float, text: str, tokens: int, timeout: float = 300.0) -> None:
        time.sleep(pause)
        ask(url, text, tokens, key, model, timeout)

    calls = [*plan, (2.5, "Tell a long story.", 400, 1.5)]
    threads = [threading.Thread(target=send, args=one, daemon=True) for one in calls]
    for thread in threads:
        thread.start()
    return threads


class Camera:
    def __init__(self, browser: Any, out: Path, every: bool) -> None:
        self.browser, self.out, self.every = browser, out, every
        out.mkdir(parents=True, exist_ok=True)

    def session(
        self,
        url: str,
        keys: dict[str, str],
        shots: list[tuple[str, str, Callable[[Any], None] | None]],
        **looks: Any,
    ) -> None:
        """shots: (page, name of the picture, what to do before). looks: name → (size, theme)."""
        for suffix, (size, theme) in self.looks(looks).items():
            width, height = SIZES[size]
            context = self.browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=theme
            )
            page = context.new_page()
            page.set_default_timeout(120_000)
            for name, value in {**keys, "ridgeline.chat": CHAT_SETTINGS}.items():
                given = f"{json.dumps(name)}, {json.dumps(value)}"
                page.add_init_script(f"sessionStorage.setItem({given})")
            page.goto(f"{url}/console")
            for where, name, act in shots:
                page.goto(f"{url}/console#/{where}")
                page.wait_for_timeout(1200)
                if act is not None:
                    act(page)
                    page.wait_for_timeout(400)
                page.mouse.move(0, 0)
                self.take(page, name + suffix)
            context.close()

    def looks(self, looks: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        if not self.every:
            return {"" if name == "plain" else f"-{name}": look for name, look in looks.items()}
        themes, sizes = ("light", "dark"), ("wide", "tablet", "phone")
        return {f"-{size}-{theme}": (size, theme) for theme in themes for size in sizes}

    def take(self, page: Any, name: str) -> None:
        path = self.out / f"{name}.png"
        page.screenshot(path=str(path), full_page=self.every)
        size = path.stat().st_size
        print(f"{path}: {size / 1000:.0f} kB", flush=True)
        if size > MOST_BYTES and not self.every:
            raise SystemExit(f"{path} has {size} bytes; at most {MOST_BYTES} belong into the repository")


CHAT_SETTINGS = json.dumps(
    dict.fromkeys(("system", "temperature", "top_p", "seed", "stop", "tools", "schema"), "")
    | {"models": ["", ""], "compare": False, "logprobs": False, "max_tokens": "90"}
)


def chat(page: Any) -> None:
    page.wait_for_selector(".composer select option", state="attached")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".reply[data-state=done] .reply-figures")


def record(page: Any) -> None:
    page.wait_for_selector("tbody tr")
    page.locator("tbody tr", has_text="71").or_(page.locator("tbody tr")).first.click()


def reports(page: Any) -> None:
    page.wait_for_selector("tbody tr")


def server(camera: Camera, folder: Path) -> None:
    port = free_port()
    url, lab = f"http://127.0.0.1:{port}", folder / "lab"
    lab.mkdir()
    plan = (
        "plan",
        MODEL,
        "--input",
        "500",
        "--output",
        "100",
        "--rate",
        "1",
        "--slo",
        "ttft_p90=10s,tpot_p90=1s",
    )
    subprocess.run([sys.executable, "-m", "ridgeline.cli.main", *plan], cwd=lab, stdout=subprocess.DEVNULL)
    serve = ("serve", MODEL, "--port", str(port), "--kv-tokens", "16384", "--prefill-chunk", "128")
    with started(*serve, "--console-reports", str(lab)) as process:
        until_ready(f"{url}/ready", process)

        def live(page: Any) -> None:
            for wave in range(1 if camera.every else WAVES):
                page.wait_for_timeout(3000 if wave % 2 else 500)
                for thread in traffic(url):
                    thread.join(2.5)

        def open_report(page: Any) -> None:
            reports(page)
            page.locator("tbody button").first.click()
            page.wait_for_timeout(800)

        pages = [("live", "live", live), ("chat", "chat", chat), ("requests", "requests", record)]
        looks = {"plain": ("desk", "light"), "dark": ("desk", "dark"), "phone": ("phone", "light")}
        camera.session(url, {}, [*pages, ("lab", "lab", open_report)], **looks)


def gateway(camera: Camera, folder: Path) -> None:
    port, admin_port, upstream = free_port(), free_port(), free_port()
    state, url = folder / "state", f"http://127.0.0.1:{admin_port}"
    (folder / "gateway.toml").write_text(
        f'[gateway]\nport = {port}\nstate_dir = "{state}"\n[admin]\nport = {admin_port}\n'
        f'[[upstreams]]\nname = "local"\nkind = "ridgeline"\nurl = "http://127.0.0.1:{upstream}"\n'
        f'[[models]]\nname = "small"\ntargets = ["local/{MODEL}"]\nprice_in = 0.05\nprice_out = 0.10\n'
    )
    serve = ("serve", MODEL, "--port", str(upstream), "--kv-tokens", "16384")
    with started(*serve) as process, started("gateway", "--config", str(folder / "gateway.toml")) as front:
        until_ready(f"http://127.0.0.1:{upstream}/ready", process)
        until_ready(f"{url}/health", front)
        admin = (state / "admin-key").read_text().split()[-1]
        keys = []
        for name, limits in (
            ("support bot", {"daily_usd": 0.05, "monthly_usd": 1.0, "requests_per_minute": 600}),
            ("search", {"requests_per_minute": 1200}),
            ("nightly evaluation", {"concurrent": 8, "monthly_usd": 0.2}),
            ("laptop of Ada", {"daily_usd": 0.02}),
        ):
            keys.append(call(f"{url}/admin/keys", {"name": name, "limits": limits}, admin))
        sqlite_ledger(state / "ledger.sqlite").insert(example_rows([one["id"] for one in keys]))
        secrets = {"ridgeline.key": admin, "ridgeline.key.chat": keys[0]["secret"]}
        pages = [("spend", "spend", None), ("keys", "keys", None), ("chat", "gateway-chat", chat)]
        camera.session(url, secrets, pages, plain=("desk", "light"))


def example_rows(keys: list[str]) -> list[LedgerRow]:
    chance, rows = random.Random(3), []
    models = (("small", 50_000, 100_000), ("qwen3-8b", 200_000, 600_000), ("gpt-oss-20b", 500_000, 1_500_000))
    for day in range(30):
        for number in range(12 if day % 7 in (2, 3) else chance.randint(40, 100)):
            model, price_in, price_out = chance.choices(models, (8, 5, 2))[0]
            tokens_in, out = int(chance.lognormvariate(6.5, 1)), int(chance.lognormvariate(5, 0.8))
            row = LedgerRow(
                f"example_{day}_{number}",
                int((time.time() - day * 86_400 - chance.random() * 80_000) * 1000),
                key_id=chance.choices(keys, (6, 3, 2, 1))[0],
                team_id=chance.choice(("support", "research")),
                endpoint="chat",
                model=model,
                upstream="local",
                status=200,
                usage_source="reported",
            )
            row.tokens_in, row.tokens_out = tokens_in, out
            row.tokens_cached = int(tokens_in * chance.random() * 0.8)
            row.cost_pusd = tokens_in * price_in + out * price_out
            rows.append(row)
    return rows


def fleet(camera: Camera, folder: Path) -> None:
    port, control = free_port(), free_port()
    state, url = folder / "state", f"http://127.0.0.1:{control}"
    (folder / "fleet.toml").write_text(
        f'[fleet]\nport = {port}\nstate_dir = "{state}"\ncontrol_host = "127.0.0.1"\n'
        f'control_port = {control}\n[[models]]\nname = "chat"\nsource = "{MODEL}"\nreplicas = 2\n'
        "[models.serve]\nkv_tokens = 8192\nthreads = 1\n"
    )
    with started("fleet", "up", str(folder / "fleet.toml")) as process:
        token_file = state / "control-token"
        while not token_file.exists():
            time.sleep(0.2)
        token = token_file.read_text().strip()
        until_ready(f"{url}/fleet/status", process, token)
        while call(f"{url}/fleet/status", key=token)["models"][0]["serving"] < 2:
            time.sleep(0.5)

        def load(page: Any) -> None:
            for thread in traffic(f"http://127.0.0.1:{port}", model="chat"):
                thread.join(2.5)

        camera.session(url, {"ridgeline.key": token}, [("fleet", "fleet", load)], plain=("desk", "light"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="server,gateway,fleet", help="hosts, comma-separated (default: all)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/figures/console", help="folder of the pictures"
    )
    parser.add_argument("--every", type=Path, help="all pages, themes and widths, into this folder")
    arguments = parser.parse_args()
    hosts = {"server": server, "gateway": gateway, "fleet": fleet}
    with launched() as browser, tempfile.TemporaryDirectory() as folder:
        camera = Camera(browser, arguments.every or arguments.out, arguments.every is not None)
        for name in arguments.only.split(","):
            if name not in hosts:
                parser.error(f"--only: {name!r} is unknown; known: {', '.join(hosts)}")
            (Path(folder) / name).mkdir()
            hosts[name](camera, Path(folder) / name)


if __name__ == "__main__":
    main()
