"""Two HTTP servers of the same model, ours and llama.cpp's, started, loaded and weighed in the same way.

Called by cpu_vs_llamacpp.py for its HTTP, start-up and memory rows. Ours runs with its defaults; llama-server
needs its slots and context stated, because by its defaults 16 streams would not run together.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from versus.http_load import LoadFailed, Round, first_token_at, run_round
from versus.peer_llamacpp import LlamaCpp, Variant
from versus.quiet_machine import process_tree

STREAMS = 16
ANSWER_TOKENS = 64
KV_TOKENS = 8192
SYSTEM_WORDS, FILLING_WORDS = (
    285,
    400,
)  # of one token each, about: a 300-token prompt, and one that fills a slot
PATIENCE_S = 120
# Common words: one token each in any English vocabulary, so that a prompt's length is known.
WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city name team
"""

Conversation = list[dict[str, str]]


@dataclass
class Server:
    """A server process. `start` returns when it has streamed its first token."""

    name: str
    command: list[str]  # the port is appended
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    def start(self) -> float:
        """Seconds from the start of the process to the first streamed token."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        started = time.perf_counter()
        process = subprocess.Popen(
            [*self.command, "--port", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.process = process
        try:
            return first_token_at(self.port, started, lambda: process.poll() is None, PATIENCE_S)
        except LoadFailed as error:
            self.stop()
            raise LoadFailed(f"{' '.join(self.command)}: {error}") from error

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def peak_resident_bytes(self) -> int:
        """The high-water marks of all its processes together; pages they share count for each."""
        assert self.process is not None
        return sum(_status_bytes(pid, "VmHWM") for pid in process_tree(self.process.pid))


def ours(model: str, *flags: str) -> Server:
    return Server("ridgeline", [sys.executable, "-m", "ridgeline.cli.main", "serve", model, *flags])


def theirs(peer: LlamaCpp, model: Path, variant: Variant, slots: int | None = STREAMS) -> Server:
    """With `slots` None it starts as by default: for the time it takes, not for load."""
    command = [
        peer.program("llama-server"), "-m", str(model), "--host", "127.0.0.1",
        "-t", str(peer.threads), "-tb", str(peer.threads), *variant.flags,
    ]  # fmt: skip
    if slots is not None:
        command += ["-np", str(slots), "-c", str(KV_TOKENS)]
    return Server(f"llama-server {variant}", command)


def _status_bytes(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/status has no {key}")


# ---- conversations ----


def random_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


def shared_prompt_round(server: Server, system: str, rng: random.Random) -> Round:
    """16 users of one application: the same system prompt, a question of each."""
    conversations: list[Conversation] = [
        [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Tell me about the {random_words(rng, 6)}, please."},
        ]
        for _ in range(STREAMS)
    ]
    return run_round(server.port, conversations, ANSWER_TOKENS)


def new_system_prompt(rng: random.Random) -> str:
    """Different from its first word on, so that no cache knows its beginning."""
    return random_words(rng, SYSTEM_WORDS)


def fill_kv(server: Server, rng: random.Random) -> None:
    """16 long conversations that share nothing: the whole cache is in use, its pages touched."""
    conversations: list[Conversation] = [
        [{"role": "user", "content": random_words(rng, FILLING_WORDS)}] for _ in range(STREAMS)
    ]
    run_round(server.port, conversations, ANSWER_TOKENS)
