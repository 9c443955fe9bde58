"""free_port(): a port for a server that is started later, by a program that must be told its number.

The system gives ports of one range to outgoing connections and to listeners that ask for any port. A port of
that range is free when it is looked for, and may be in use when the server binds it; a port outside of the
range is not. Stands outside the layers.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

HOST = "127.0.0.1"
LOWEST, HIGHEST = 10_000, 19_999  # most systems give ports from 32,768 on
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_RANGE = (32_768, 60_999)  # where the system does not say its range
TRIES = 100

_given: set[int] = set()


def free_port() -> int:
    """A free port on loopback, never the same one twice in this process."""
    first, last = given_by_the_system()
    outside = [port for port in range(LOWEST, HIGHEST + 1) if not first <= port <= last]
    chosen = secrets.SystemRandom().sample(outside, min(TRIES, len(outside)))
    for port in chosen:
        if port not in _given and (found := _bound(port)):
            _given.add(found)
            return found
    while (found := _bound(0)) in _given:  # its range has them all, or other programs do
        pass
    _given.add(found)
    return found


def given_by_the_system() -> tuple[int, int]:
    """The first and the last port of the range from which the system chooses."""
    try:
        first, last = map(int, RANGE.read_text().split())
    except (OSError, ValueError):
        return USUAL_RANGE
    return first, last


def _bound(port: int) -> int:
    """The number of this port, 0 for any; 0 if it is in use."""
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return 0
        number: int = probe.getsockname()[1]
        return number
