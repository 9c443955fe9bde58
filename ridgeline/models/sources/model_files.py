"""The files of a model on this machine, with their sha256: what a replica may share, as a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ridgeline.models.files.registry import find_known
from ridgeline.models.sources.file_hashes import file_sha256
from ridgeline.models.sources.manifest import SUFFIXES, HeldFile, Manifest, is_safe


def plain_name(model: str) -> str:
    """A MODEL argument that can be compared: a short name, org/name[@revision], or the path as it is given.

    Two folders with the same last part are two models.
    """
    known = find_known(model)
    return known.name if known is not None else model.removeprefix("hf:")


def model_files(path: Path) -> dict[str, Path]:
    """By name, relative to the model's folder. A model of one file has that one alone."""
    if path.is_file():
        return {path.name: path}
    found = {}
    for file in sorted(_below(path)):
        name = file.relative_to(path).as_posix()
        if file.name.endswith(SUFFIXES) and not _is_record(file.name) and is_safe(name):
            found[name] = file
    return found


def manifest_of(model: str, path: Path) -> tuple[Manifest, dict[str, Path]]:
    """What to offer, and the file behind each sha256. Hashes what was never hashed."""
    files = model_files(path)
    held = {name: HeldFile(name, file.stat().st_size, file_sha256(file)) for name, file in files.items()}
    manifest = Manifest(model, tuple(held.values()), entry=path.name if path.is_file() else "")
    return manifest, {held[name].sha256: file for name, file in files.items()}


def _below(folder: Path) -> Iterator[Path]:
    """Files of the folder and of those below it, two levels deep. Links of the hub's cache are followed."""
    for pattern in ("*", "*/*"):
        yield from (file for file in folder.glob(pattern) if file.is_file())


def _is_record(name: str) -> bool:
    return name.endswith(".manifest.json")
