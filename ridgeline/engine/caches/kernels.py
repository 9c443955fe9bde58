"""Triton's compiled kernels as a shipped cache: a folder for each kernel, with files and a list of them.

The list (`__grp__….json`) has absolute paths: Triton compiles again where they do not exist, so that an
installed one gets this machine's. A folder is installed by one rename; one that exists stays as it is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ridgeline.engine.caches.keys import Key
from ridgeline.machine import cache_dir
from ridgeline.models.sources.archive import BadArchive

KEY_FILE = "ridgeline-key.json"  # the machine that the folder's kernels were compiled for
_GROUP = "__grp__"
_TEMPORARY = "tmp."


def kernel_dir() -> Path:
    """Where the engine lets Triton keep its kernels."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or cache_dir() / "triton")


def compiled_files(folder: Path) -> dict[str, Path]:
    """The files of every kernel whose list is complete, by name."""
    found: dict[str, Path] = {}
    for kernel in sorted(folder.glob("*/")):
        files = {
            f"{kernel.name}/{file.name}": file
            for file in sorted(kernel.iterdir())
            if file.is_file() and not file.is_symlink() and file.name != "lock"
        }
        is_written = any(path.name.startswith(_TEMPORARY) for path in kernel.iterdir())
        if files and not is_written:
            found |= files
    return found


def holds(folder: Path, key: Key) -> bool:
    """Whether kernels for this machine are there already."""
    try:
        return bool(json.loads((folder / KEY_FILE).read_text(encoding="utf-8")) == key)
    except (OSError, ValueError):
        return False


def mark(folder: Path, key: Key) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{KEY_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(key), encoding="utf-8")
    temporary.replace(folder / KEY_FILE)


def install(unpacked: Path, folder: Path, key: Key) -> int:
    """Move the unpacked kernels into Triton's folder. Returns how many are new; raises BadArchive."""
    kernels = sorted(path for path in unpacked.iterdir() if path.is_dir())
    for kernel in kernels:
        for group in kernel.glob(f"{_GROUP}*"):
            _relocate(group, folder / kernel.name)
    folder.mkdir(parents=True, exist_ok=True)
    new = 0
    for kernel in kernels:
        if not (folder / kernel.name).exists():
            kernel.rename(folder / kernel.name)
            new += 1
    mark(folder, key)
    return new


def _relocate(group: Path, kernel: Path) -> None:
    """Let a kernel's list name the files beside it, at the place where the kernel will be."""
    try:
        paths = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        moved = {str(name): str(kernel / Path(str(path)).name) for name, path in paths.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadArchive(
            f"{group.parent.name}/{group.name} is not a list of a kernel's files: {error}"
        ) from None
    for path in moved.values():
        if not (group.parent / Path(path).name).is_file():
            raise BadArchive(f"{group.parent.name} lacks {Path(path).name}, which its list names")
    group.write_text(json.dumps({"child_paths": moved}), encoding="utf-8")
