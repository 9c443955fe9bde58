"""Packed weights as a shipped cache: found in the cache of packed weights, and installed into it.

An entry names the path and time of its source files, which differ between machines: an installed entry gets
this machine's. Its key has said before that the contents are the same.
"""

from __future__ import annotations

import os
from pathlib import Path

from ridgeline.models.sources.archive import BadArchive
from ridgeline.models.weights import packed_cache
from ridgeline.models.weights.packed_file import DamagedFile, Header, read_header

MEMBER = "entry.packed"
_COPY_BYTES = 8 << 20


def entry_of(path: Path, weights: str) -> Path | None:
    """The entry that this machine uses for a checkpoint; None if it was not packed yet."""
    machine = packed_cache.machine_key()
    files = [packed_cache.fingerprint(file) for file in packed_cache.source_files(path)]
    for entry in sorted(packed_cache.packed_dir().glob("*" + packed_cache.SUFFIX)):
        try:
            header, _ = read_header(entry)
        except (DamagedFile, OSError):
            continue
        key = header.key
        same = key.get("files") == files and key.get("weights") == weights
        if same and {name: key.get(name) for name in machine} == machine:
            return entry
    return None


def install(folder: Path, path: Path, weights: str) -> None:
    """Make the unpacked entry this machine's entry for the checkpoint at `path`. Raises BadArchive."""
    member = folder / MEMBER
    try:
        header, start = read_header(member)
    except (DamagedFile, OSError) as error:
        raise BadArchive(f"{MEMBER} cannot be used: {error}") from None
    machine = packed_cache.machine_key()
    if header.key.get("weights") != weights or {name: header.key.get(name) for name in machine} != machine:
        raise BadArchive(f"{MEMBER} was packed with other settings than its key says")
    files = [packed_cache.fingerprint(file) for file in packed_cache.source_files(path)]
    theirs = header.key.get("files")
    sizes = [one.get("bytes") for one in theirs] if isinstance(theirs, list) else []
    if sizes != [one["bytes"] for one in files]:
        raise BadArchive(f"{MEMBER} was packed from files of other sizes")
    key = {**header.key, "files": files}
    temporary = packed_cache.temporary_path(key, header.payload_bytes)
    try:
        _rewrite(member, start, Header(key, header.sections, header.notes), temporary)
        packed_cache.keep_entry(key, temporary)
    finally:
        temporary.unlink(missing_ok=True)


def _rewrite(member: Path, start: int, header: Header, target: Path) -> None:
    """The same payload behind another header. In place where the header takes as many pages as before."""
    head = header.encoded()
    if len(head) == start:
        with member.open("r+b") as file:
            file.write(head)
            file.flush()
            os.fsync(file.fileno())
        member.replace(target)
        return
    with member.open("rb") as source, target.open("xb") as out:
        source.seek(start)
        out.write(head)
        while chunk := source.read(_COPY_BYTES):
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
