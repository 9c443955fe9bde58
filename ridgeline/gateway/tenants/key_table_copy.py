"""A copy of the KeyTable in the state directory, for workers that start while PostgreSQL is unreachable.

Digests and the secret they are made with, mode 0600; no key. Written in a thread, a few keys at a time: one
large piece would hold Python's lock, and with it the event loop, for as long as it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ridgeline.gateway.tenants.key_table import Changes, KeyEntry, KeyTable
from ridgeline.gateway.tenants.keys import Team
from ridgeline.gateway.tenants.secret_file import replaced

FILE = "policy-copy.jsonl"
PIECE = 200


class _Head(msgspec.Struct):
    """The first line; each of the others is a key."""

    server_secret: str
    version: int
    keys: int
    teams: tuple[Team, ...]


def write_copy(path: Path, server_secret: str, contents: Changes) -> None:
    """OSError if it fails; the previous copy stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replaced(path, _pieces(server_secret, contents))


def read_copy(path: Path) -> KeyTable | None:
    """None if there is no complete copy."""
    try:
        head, *lines = path.read_bytes().splitlines()
        first = msgspec.json.decode(head, type=_Head)
        entry = msgspec.json.Decoder(KeyEntry)
        keys = tuple(entry.decode(line) for line in lines)
    except (OSError, ValueError):  # also what msgspec raises
        return None
    if len(keys) != first.keys:
        return None
    return KeyTable(first.server_secret).apply(Changes(first.version, True, keys, first.teams))


def _pieces(server_secret: str, contents: Changes) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    head = _Head(server_secret, contents.version, len(contents.keys), contents.teams)
    yield encoder.encode(head) + b"\n"
    for first in range(0, len(contents.keys), PIECE):
        yield encoder.encode_lines(contents.keys[first : first + PIECE])
