"""The sha256 of files on this machine.

A hash is computed once; a record in the cache directory keeps it for as long as size and time of the file
stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from ridgeline.machine import cache_dir

_READ_BYTES = 1 << 20


def file_sha256(path: Path) -> str:
    """From a record if the file is as it was, else by reading all of it."""
    path = path.resolve()
    stat = path.stat()
    if known := _recorded(path, stat):
        return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
        after = os.fstat(file.fileno())
    if (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        record_sha256(path, digest.hexdigest())
    return digest.hexdigest()


def record_sha256(path: Path, sha256: str) -> None:
    """Remember a hash that was just checked. A cache that cannot be written is hashed again."""
    path = path.resolve()
    _write_record(path, path.stat(), sha256)


def touch(path: Path) -> None:
    """Set the file's time to now. Its hash stays known. OSError where it cannot be written."""
    path = path.resolve()
    with path.open("rb") as file:  # not by name: another process may put a new file there
        known = _recorded(path, os.fstat(file.fileno()))
        os.utime(file.fileno())
        if known:
            _write_record(path, os.fstat(file.fileno()), known)


def _recorded(path: Path, stat: os.stat_result) -> str:
    """The hash of the file in this state; empty where it is not known."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(_record(path).read_text(encoding="utf-8"))
        if known["state"] == [str(path), stat.st_size, stat.st_mtime_ns]:
            return str(known["sha256"])
    return ""


def _write_record(path: Path, stat: os.stat_result, sha256: str) -> None:
    record = _record(path)
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary = record.with_suffix(f".{os.getpid()}.tmp")
        state = [str(path), stat.st_size, stat.st_mtime_ns]
        temporary.write_text(json.dumps({"sha256": sha256, "state": state}), encoding="utf-8")
        temporary.replace(record)


def _record(path: Path) -> Path:
    return cache_dir() / "sha256" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
