"""A listening Unix socket that only its user can open, for processes of one machine."""

from __future__ import annotations

import socket
from pathlib import Path

BACKLOG = 1024


def listen_private(path: Path) -> socket.socket:
    """Replaces a socket that a killed process left there: the caller knows that none listens.

    It listens at once: early connections wait until a server takes them.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    path.chmod(0o600)  # before it listens, so that no other user can connect in between
    made.listen(BACKLOG)
    made.setblocking(False)
    return made
