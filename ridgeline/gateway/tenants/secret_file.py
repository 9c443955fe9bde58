"""Files that hold a secret: read with care, made once with mode 0600 however many processes start at once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from ridgeline.gateway.tenants.errors import StoreError


def read_secret(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise StoreError(f"{path}: cannot be read: {reason}") from error


def made_once(path: Path, make: Callable[[], str]) -> bool:
    """Make the file unless it is there; True for the one process that did."""
    if path.exists():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A link appears with its whole content, and at most once.
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(make() + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
            return True
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def replaced(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a private file as a whole, or leave the one that is there. OSError when it cannot be."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
