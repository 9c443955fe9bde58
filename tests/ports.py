"""Ports for what is told its port before it listens: a server's own process, Redis, PostgreSQL.

They lie below those that the kernel gives to sockets that ask for any port, and each process of tests has its
own, also beside the tests of another checkout: none is taken between the moment it is found free and the
moment its server listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import socket
import tempfile
from pathlib import Path

FIRST, LAST = 20_000, 32_000
SHARES = 24  # processes of tests that run side by side on this machine


def _own_ports() -> range:
    try:
        given_by_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        given_by_kernel = LAST
    return range(FIRST + _own_share(), min(given_by_kernel, LAST), SHARES)


def _own_share() -> int:
    """The first share that no other process holds; the lock ends with this process."""
    for share in range(SHARES):
        path = Path(tempfile.gettempdir()) / f"ridgeline-test-ports-{os.getuid()}-{share}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return share
    return secrets.randbelow(SHARES)


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
