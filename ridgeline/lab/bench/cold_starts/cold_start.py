"""Cold start: spawn a server and stamp port open, ready, first and second token.

Repeated, since starts vary. The page cache is warm (after one uncounted start) or dropped; the result says
which. Every spawned process is ended in all cases, with its children. Called by `ridgeline bench coldstart`.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.options import without_settings
from ridgeline.ports import free_port
from ridgeline.proxy.blocking_client import BlockingClient
from ridgeline.proxy.errors import ProxyError, Unreachable

POLL_S = 0.004  # poll interval of port and readiness: the resolution of those two stamps
PROBE_S = 5.0  # for a readiness response
STOP_S = 10.0  # for a server to exit before it is killed
READY_PATHS = ("/ready", "/health")  # ours; vLLM's, SGLang's and llama-server's
TOKENS = 8
PageCache = Literal["warm", "dropped", "as_is"]


@dataclass(frozen=True)
class ColdStartConfig:
    """
    command:    of the server, with {port} where its port goes
    evict:      files and folders whose pages are dropped where those of the whole machine cannot be
    timeout_s:  for a server to be ready, and once more for its first tokens
    """

    command: Sequence[str]
    repeats: int = 5
    page_cache: PageCache = "warm"
    evict: Sequence[Path] = ()
    prompt: str = "The capital of France is"
    model: str = ""
    timeout_s: float = 600.0


class Start(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds from the spawn; None: not reached. warm_ttft_s: of a second request, from sending."""

    port_open_s: float | None = None
    ready_s: float | None = None
    sent_s: float | None = None
    first_token_s: float | None = None
    second_token_s: float | None = None
    warm_ttft_s: float | None = None
    failure: str = ""


class ColdStarts(msgspec.Struct, omit_defaults=True):
    command: str
    page_cache: str  # what was done, in words
    starts: list[Start]
    wanted: int
    started_at: str = ""
    machine: str = ""
    resolution_s: float = POLL_S

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


SEGMENTS: dict[str, Callable[[Start], float | None]] = {
    "spawn → port open": lambda start: start.port_open_s,
    "port open → ready": lambda start: _between(start.port_open_s, start.ready_s),
    "ready → first token": lambda start: _between(start.ready_s, start.first_token_s),
    "first → second token": lambda start: _between(start.first_token_s, start.second_token_s),
    "spawn → first token": lambda start: start.first_token_s,
    "TTFT of the first request": lambda start: _between(start.sent_s, start.first_token_s),
    "TTFT of a second request": lambda start: start.warm_ttft_s,
}


def cold_starts(
    config: ColdStartConfig, on_start: Callable[[int, Start], None] = lambda number, start: None
) -> ColdStarts:
    """One after the other; Ctrl-C or SIGTERM keeps the measured ones. on_start: number 0 is the priming
    start.
    """
    if not any("{port}" in word for word in config.command):
        raise BadInput("the command needs {port} where the server's port goes, as in --port {port}")
    if config.repeats < 1:
        raise BadInput(f"--repeats must be at least 1, got {config.repeats}")
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = ColdStarts(shlex.join(config.command), "", [], config.repeats, begun, platform.platform())
    found.page_cache = _drop(config) if config.page_cache == "dropped" else config.page_cache
    terminated = _on_sigterm(signal.default_int_handler)
    try:
        if config.page_cache == "warm":
            primed = one_start(config)
            on_start(0, primed)
            if primed.first_token_s is None:
                raise LabError(f"the server did not start: {primed.failure}")
            found.page_cache = "warm: the server was started once before"
        for number in range(1, config.repeats + 1):
            if config.page_cache == "dropped" and number > 1:
                _drop(config)
            start = one_start(config)
            found.starts.append(start)
            on_start(number, start)
    except KeyboardInterrupt:
        if not found.starts:
            raise
    finally:
        _on_sigterm(terminated)
    return found


def one_start(config: ColdStartConfig) -> Start:
    """Spawn, stamp, end. A failure is in `failure`, with the server's last line."""
    port = free_port()
    command = [word.replace("{port}", str(port)) for word in config.command]
    with tempfile.TemporaryFile() as log, _spawned(command, log) as (process, begun):
        stamps: dict[str, float] = {}
        try:
            deadline = begun + config.timeout_s
            client = BlockingClient(f"http://127.0.0.1:{port}", timeout_s=config.timeout_s, direct=True)
            prober = BlockingClient(client.url, timeout_s=PROBE_S, direct=True)
            _wait(process, deadline, "its port was not open", lambda: _is_open(port))
            stamps["port_open_s"] = time.perf_counter() - begun
            path = _ready_path(prober, process, deadline)
            _wait(process, deadline, f"{path} did not report readiness", lambda: prober.is_ready(path))
            stamps["ready_s"] = time.perf_counter() - begun
            model = config.model or _first_model(client)
            stamps["sent_s"] = time.perf_counter() - begun
            tokens = _tokens(client, model, config.prompt, config.timeout_s)
            stamps["first_token_s"] = next(tokens) - begun
            stamps["second_token_s"] = next(tokens) - begun
            for _ in tokens:
                pass
            again = time.perf_counter()
            # Different words, so that the prefix cache does not serve the prefill.
            stamps["warm_ttft_s"] = next(_tokens(client, model, "Name a river:", config.timeout_s)) - again
        except (_NotUp, OSError, ProxyError, StopIteration, ValueError) as error:
            words = str(error) or "the stream ended before a second token"
            return _stamped(stamps, f"{words}{_last_words(log)}")
        return _stamped(stamps)


def _on_sigterm(handler: Any) -> Any:
    """The previous handler; None from a thread, which cannot set one."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler)


def _stamped(stamps: dict[str, float], failure: str = "") -> Start:
    return msgspec.convert({**stamps, "failure": failure}, Start)


class _NotUp(Exception):
    pass


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _spawned(command: Sequence[str], log: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """In its own session, so that its children end with it; it also ends with this process."""
    begun = time.perf_counter()
    try:
        process = subprocess.Popen(
            command,
            env=without_settings(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_us,
        )
    except OSError as error:
        raise BadInput(f"{command[0]}: cannot be run: {error.strerror}") from error
    try:
        yield process, begun
    finally:
        _end(process)


def _die_with_us() -> None:
    """Linux: SIGKILL when the parent dies, however it dies (PR_SET_PDEATHSIG)."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate, wait, then kill the rest of its session; a second Ctrl-C only shortens the wait."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], deadline: float, what: str, done: Callable[[], bool]) -> None:
    while not done():
        if process.poll() is not None:
            raise _NotUp(f"the server ended with code {process.returncode}")
        if time.perf_counter() > deadline:
            raise _NotUp(f"{what} in time")
        time.sleep(POLL_S)


def _last_words(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 2000))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return f"; its last line: {lines[-1][:300]}" if lines else ""


# ── asking it ────────────────────────────────────────────────────────────────────────────────────────────


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _status(client: BlockingClient, path: str) -> int:
    """0: no answer."""
    try:
        with client.open("GET", path) as answer:
            return answer.status
    except Unreachable:
        return 0


def _ready_path(client: BlockingClient, process: subprocess.Popen[bytes], deadline: float) -> str:
    """The first path that the server knows."""
    found: list[str] = []

    def known() -> bool:
        statuses = {path: _status(client, path) for path in READY_PATHS}
        found[:] = [path for path, status in statuses.items() if status not in (0, 404, 405)]
        return bool(found)

    _wait(process, deadline, f"none of {', '.join(READY_PATHS)} was answered", known)
    return found[0]


def _first_model(client: BlockingClient) -> str:
    try:
        listed = msgspec.json.decode(client.ask("GET", "/v1/models").body)
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError, msgspec.DecodeError) as error:
        raise ValueError("/v1/models names no model; give its name as MODEL beside --command") from error


def _tokens(client: BlockingClient, model: str, prompt: str, timeout_s: float) -> Iterator[float]:
    """Arrival times of the chunks with text of a streamed completion, all within timeout_s."""
    deadline = time.perf_counter() + timeout_s
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    with client.open("POST", "/v1/completions", msgspec.json.encode(body)) as answer:
        if answer.status != 200:
            raise ValueError(f"/v1/completions answered {answer.status}: {answer.read(300)!r}")
        for line in answer.lines():
            moment = time.perf_counter()
            if moment > deadline:
                raise _NotUp("its first tokens did not arrive in time")
            if line.startswith(b"data: {") and _has_text(line[6:]):
                yield moment


def _has_text(data: bytes) -> bool:
    choices = msgspec.json.decode(data).get("choices") or [{}]
    return bool(choices[0].get("text"))


# ── the page cache ───────────────────────────────────────────────────────────────────────────────────────


def _drop(config: ColdStartConfig) -> str:
    """Drop the machine's page cache if permitted, else that of the named files; returns a description."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        pass
    else:
        return "dropped: all of the machine's, before every start"
    files = [file for place in config.evict for file in _files(place)]
    if not files:
        raise LabError(
            "the machine's page cache cannot be dropped here (needs root); name the model's files with "
            "--evict to drop theirs, or measure with --page-cache warm"
        )
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    size = sum(file.stat().st_size for file in files)
    return f"dropped: {len(files)} named files ({size / 1e6:.0f} MB) before every start; libraries stay warm"


def _files(place: Path) -> list[Path]:
    if not place.exists():
        raise BadInput(f"--evict {place}: there is no such file")
    return [file for file in sorted(place.rglob("*")) if file.is_file()] if place.is_dir() else [place]


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
