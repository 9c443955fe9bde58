"""Files with a secret: created once, with mode 0600, even if several processes start at once."""

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
    """Create the file unless it exists; True for the one process that created it."""
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
    """Replace a private file atomically. OSError if it fails; the old file stays."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
