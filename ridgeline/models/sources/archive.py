"""Archive: a set of cache files as one tar with the key they are valid for and the sha256 of each file.

An archive is not written to disk: a peer reads ranges of it from the files themselves. `unpack` trusts
nothing: only plain files that the manifest lists, under safe names, with the right bytes, into a new folder.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ridgeline.models.sources.file_hashes import file_sha256
from ridgeline.models.sources.manifest import FORMAT, MANIFEST_BYTES, MANIFEST_FILE, is_safe

_BLOCK = tarfile.BLOCKSIZE
_READ_BYTES = 1 << 20


class BadArchive(Exception):
    """An archive that cannot be used; the message says why. Nothing of it was installed."""


class ArchivedFile(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    sha256: str


class ArchiveManifest(msgspec.Struct, frozen=True):
    kind: str
    key: dict[str, str]
    files: tuple[ArchivedFile, ...]
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of the archive from `start`: given here, or in a file."""

    start: int
    size: int
    data: bytes = b""
    path: Path | None = None


class Archive:
    """The bytes of a tar, computed from its files when they are read."""

    def __init__(self, kind: str, key: Mapping[str, str], files: Mapping[str, Path]) -> None:
        """files: by name. OSError where one cannot be read."""
        self.manifest, self._files = _listed(kind, key, files), dict(files)
        self._pieces: list[_Piece] = []
        self.size = 0
        content = msgspec.json.encode(self.manifest)
        self._add(_head(MANIFEST_FILE, len(content)) + _padded(content))
        for one in self.manifest.files:
            self._add(_head(one.name, one.bytes))
            self._add_file(files[one.name], one.bytes)
        self._add(bytes(2 * _BLOCK))
        self.sha256 = self._hash()

    def is_of(self, kind: str, key: Mapping[str, str], files: Mapping[str, Path]) -> bool:
        """Whether an archive of these files, as they are now, has the same bytes. Hashes only new files."""
        return self._files == files and self.manifest == _listed(kind, key, files)

    def read(self, start: int, size: int) -> bytes:
        """A range. OSError where a file has changed since."""
        found = io.BytesIO()
        end = min(start + size, self.size)
        for piece in self._pieces:
            first, last = max(start, piece.start), min(end, piece.start + piece.size)
            if first >= last:
                continue
            if piece.path is None:
                found.write(piece.data[first - piece.start : last - piece.start])
                continue
            with piece.path.open("rb") as file:
                file.seek(first - piece.start)
                data = file.read(last - first)
            if len(data) != last - first:
                raise OSError(f"{piece.path} was cut")
            found.write(data)
        return found.getvalue()

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            for at in range(0, self.size, _READ_BYTES):
                file.write(self.read(at, _READ_BYTES))

    def _add(self, data: bytes) -> None:
        self._pieces.append(_Piece(self.size, len(data), data))
        self.size += len(data)

    def _add_file(self, path: Path, size: int) -> None:
        self._pieces.append(_Piece(self.size, size, path=path))
        self.size += size
        if size % _BLOCK:
            self._add(bytes(_BLOCK - size % _BLOCK))

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for at in range(0, self.size, _READ_BYTES):
            digest.update(self.read(at, _READ_BYTES))
        return digest.hexdigest()


def _listed(kind: str, key: Mapping[str, str], files: Mapping[str, Path]) -> ArchiveManifest:
    listed = [(name, files[name].stat().st_size, file_sha256(files[name])) for name in sorted(files)]
    return ArchiveManifest(kind, dict(key), tuple(ArchivedFile(*one) for one in listed))


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Where two keys differ, in words; empty for equal keys."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name} is {theirs.get(name, 'not given')} there and {ours.get(name, 'not given')} here"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def unpack(archive: Path, kind: str, key: Mapping[str, str], folder: Path) -> ArchiveManifest:
    """Extract into a folder that is empty. Raises BadArchive; what is in the folder then is to be removed."""
    try:
        with tarfile.open(archive, "r:") as tar:
            manifest = _manifest(tar, kind, key)
            listed = {one.name: one for one in manifest.files}
            while (member := tar.next()) is not None:
                one = listed.pop(member.name, None)
                if one is None:
                    raise BadArchive(f"it has {member.name!r}, which its manifest does not list")
                if not _is_plain(member) or member.size != one.bytes:
                    raise BadArchive(f"{member.name} is not a plain file of {one.bytes} bytes")
                _extract(tar, member, one, folder / one.name)
            if listed:
                raise BadArchive(f"{next(iter(listed))} is missing")
            return manifest
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise BadArchive(f"it is not a whole tar: {error}") from None


def _manifest(tar: tarfile.TarFile, kind: str, key: Mapping[str, str]) -> ArchiveManifest:
    first = tar.next()
    if first is not None and first.size > MANIFEST_BYTES:
        raise BadArchive(f"its manifest has more than {MANIFEST_BYTES >> 20} MiB")
    content = tar.extractfile(first) if first is not None and _is_plain(first) else None
    if first is None or content is None or first.name != MANIFEST_FILE:
        raise BadArchive(f"it does not begin with {MANIFEST_FILE}")
    try:
        manifest = msgspec.json.decode(content.read(), type=ArchiveManifest)
    except msgspec.MsgspecError as error:
        raise BadArchive(f"its manifest cannot be read: {error}") from None
    if manifest.kind != kind or manifest.format != FORMAT:
        raise BadArchive(f"it is {manifest.kind}, format {manifest.format}")
    if other := differences(manifest.key, key):
        raise BadArchive("it is for another machine: " + "; ".join(other))
    _check_names(manifest.files)
    return manifest


def _is_plain(member: tarfile.TarInfo) -> bool:
    """A sparse file is none: a few bytes of it become any number of zeros."""
    return member.isreg() and not member.issparse()


def _check_names(files: Sequence[ArchivedFile]) -> None:
    for one in files:
        if not is_safe(one.name) or one.name == MANIFEST_FILE:
            raise BadArchive(f"the name {one.name!r} could leave the cache")
    if len({one.name for one in files}) != len(files):
        raise BadArchive("its manifest lists a file twice")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, one: ArchivedFile, target: Path) -> None:
    content = tar.extractfile(member)
    assert content is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb") as out:
        while chunk := content.read(_READ_BYTES):
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != one.sha256:
        raise BadArchive(f"{one.name} has another sha256 than its manifest says")


def _head(name: str, size: int) -> bytes:
    """The same bytes on every machine: no time, no owner."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % _BLOCK)
