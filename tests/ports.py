"""Ports for what is told its port before it listens: a server's own process, Redis, PostgreSQL.

They lie below those that the kernel gives to sockets that ask for any port, and each process of tests has its
own: none is taken between the moment it is found free and the moment its server listens.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
from pathlib import Path

FIRST, LAST = 20_000, 32_000
SHARES = 16  # processes of tests that run side by side


def _own_ports() -> range:
    try:
        given_by_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        given_by_kernel = LAST
    number = int("".join(filter(str.isdigit, os.environ.get("PYTEST_XDIST_WORKER", ""))) or 0)
    return range(FIRST + number % SHARES, min(given_by_kernel, LAST), SHARES)


_PORTS = _own_ports()
_turns = itertools.count(secrets.randbelow(len(_PORTS) or 1))


def free_port() -> int:
    """Another one at each call."""
    for _ in _PORTS:
        port = _PORTS[next(_turns) % len(_PORTS)]
        with contextlib.suppress(OSError):
            return _bound(port)
    return _bound(0)  # a kernel that gives out all of them


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        found: int = probe.getsockname()[1]
        return found
