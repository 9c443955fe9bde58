"""Servers, gateways and fleets of this user that run now: each keeps a small record in a file while it runs.

`serve` and `gateway` write it; `ps`, `stop` and `models rm` read it. There is no daemon: a record counts only
while its process lives, and a reader removes those of dead processes. Stands outside the layers.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from ridgeline.options import OptionError
from ridgeline.version import __version__

Kind = Literal["server", "gateway", "fleet"]
State = Literal["starting", "ready", "stopping"]


class SetState(Protocol):
    def __call__(
        self, state: State, *, admin_url: str = "", state_dir: str = "", key_file: str = ""
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class RunRecord:
    """
    ticks:     when the process began, in the kernel's clock ticks: another process that gets the same number
               later has another
    place:     boot and PID namespace, which process numbers belong to
    names:     what clients may ask for
    sources:   the MODEL arguments behind them
    admin_url: address of a gateway's admin API
    state_dir: a gateway's state directory
    key_file:  the file with a gateway's admin keys
    """

    kind: Kind
    pid: int
    ticks: int
    machine: str
    place: str
    url: str
    names: tuple[str, ...]
    sources: tuple[str, ...]
    state: State
    started_at: float
    version: str
    admin_url: str = ""
    state_dir: str = ""
    key_file: str = ""

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]


@contextlib.contextmanager
def announced(kind: Kind, url: str, names: Sequence[str], sources: Sequence[str] = ()) -> Iterator[SetState]:
    """Keep a record of this process inside the context. A home that cannot be written has none."""
    pid = os.getpid()
    ticks = process_ticks(pid)
    first = RunRecord(
        kind,
        pid,
        ticks or 0,
        platform.node(),
        process_place(),
        url,
        tuple(names),
        tuple(sources),
        "starting",
        time.time(),
        __version__,
    )
    folder = _folder()
    # Without /proc a later process could not tell a live one from a dead one: no record then.
    path = None if folder is None or ticks is None else folder / f"{pid}.json"

    def write(state: State, *, admin_url: str = "", state_dir: str = "", key_file: str = "") -> None:
        if path is None:
            return
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = path.with_suffix(".tmp")
            temporary.touch(mode=0o600)
            now = replace(first, state=state, admin_url=admin_url, state_dir=state_dir, key_file=key_file)
            temporary.write_text(json.dumps(asdict(now)), encoding="utf-8")
            temporary.replace(path)

    write("starting")
    try:
        yield write
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def running() -> list[RunRecord]:
    """Records of processes that live, the oldest first. Removes those of dead ones."""
    folder = _folder()
    if folder is None or not folder.is_dir():
        return []
    found = []
    for path in folder.glob("*.json"):
        record = _read(path)
        if record is None or record.machine != platform.node():
            continue  # written by a later version, or on another machine with the same home directory
        if is_alive(record):
            found.append(record)
        elif _is_over(record):
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda record: record.started_at)


def running_gateway(admin_url: str | None = None) -> RunRecord | None:
    """The gateway with this admin address; without one, the only gateway that runs."""
    found = [one for one in running() if one.admin_url and admin_url in (None, one.admin_url)]
    return found[0] if len(found) == 1 else None


def running_fleets() -> list[RunRecord]:
    return [one for one in running() if one.kind == "fleet" and one.state_dir]


def state_home() -> Path:
    """The parent of all state directories: $XDG_STATE_HOME/ridgeline, or ~/.local/state/ridgeline."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # a container user without an entry in /etc/passwd
        raise OptionError(
            "the home directory is unknown, which has the state directory: set HOME, or choose a directory "
            "with --state-dir"
        ) from None
    return Path(base) / "ridgeline"


def is_alive(record: RunRecord) -> bool:
    return record.place == process_place() and process_ticks(record.pid) == record.ticks


def end(record: RunRecord, timeout_s: float, *, at_once: bool = False) -> bool:
    """Send SIGTERM and wait for the end; False where the process outlives the timeout.

    at_once: send it again and again, which ends a server without its running answers.
    """
    deadline = time.monotonic() + timeout_s
    try:
        process = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return True
    try:
        # Held by the descriptor, the number cannot pass to another process between the check and the signal.
        if not is_alive(record):
            return True
        signal.pidfd_send_signal(process, signal.SIGTERM)
        while is_alive(record):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
            if at_once:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGTERM)
        return True
    except ProcessLookupError:
        return True
    finally:
        os.close(process)


def _read(path: Path) -> RunRecord | None:
    try:
        if path.stat().st_uid != os.getuid():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        return RunRecord(**values | {name: tuple(values[name]) for name in ("names", "sources")})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_over(record: RunRecord) -> bool:
    """Dead for certain. In another PID namespace of the same boot it may live, unseen from here."""
    boot, _, namespace = record.place.partition(" ")
    own_boot, _, own_namespace = process_place().partition(" ")
    return boot != own_boot or namespace == own_namespace


def _folder() -> Path | None:
    try:
        return state_home() / "run"
    except OptionError:
        return None


def process_place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_ticks(pid: int) -> int | None:
    """When the process began; None where there is none, or only its exit code is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
