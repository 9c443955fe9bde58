"""Reserves disk space for a file before it is written.

A write through a memory map to a full disk ends the process with SIGBUS and no message. Reserved blocks
cannot run out, so that a full disk is an error with the file's name. Called by the writers of models.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


def reserve(descriptor: int, nbytes: int, path: Path) -> None:
    """Give the open file `nbytes` of disk space. OSError with the file and both sizes if there is none."""
    if not nbytes:
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            error.errno,
            f"the disk is full: the file needs {_size(nbytes)}, and {_size(free)} are free",
            str(path),
        ) from None


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
