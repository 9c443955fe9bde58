"""The process between a Ray actor and its server: runs the server, and ends it when the actor dies.

    python -m ridgeline.fleet.substrates.ray_guard LOG COMMAND…

Standard input is a pipe from the actor: a line `stop` sends SIGTERM; the end of the pipe, which follows any
death of the actor, kills the whole session. Reports go to standard output as JSON lines: {"pid": …}, then
{"exit": …}.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    log, *command = arguments
    with Path(log).open("ab") as file:
        try:
            server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=_die_with_the_guard
            )
        except OSError as error:
            _report(exit=127, reason=f"cannot start {command[0]}: {error.strerror}")
            return 1
    _report(pid=server.pid)
    _follow(server)
    _kill_session()
    code = server.wait()
    _report(exit=code)
    return 0


def _follow(server: subprocess.Popen[bytes]) -> None:
    """Wait until the server ends or the actor dies."""
    ended = os.pidfd_open(server.pid)
    actor = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([ended, actor], [], [])
        if ended in ready:
            return
        line = os.read(actor, 4096)
        if not line:
            return
        if b"stop" in line:
            server.terminate()


def _kill_session() -> None:
    """Kill the server and its engines, which may have their own process groups."""
    own = os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == own and int(folder.name) != own:
                os.kill(int(folder.name), signal.SIGKILL)
        except (OSError, ValueError, IndexError):
            continue


def _die_with_the_guard() -> None:
    # This thread is the guard's only one, so the signal comes at the guard's death and not before.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _report(**fields: object) -> None:
    try:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
    except OSError:
        pass  # the actor has died


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
