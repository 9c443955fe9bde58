"""The pages of a mapped file: they count as this process's memory until they are dropped."""

from __future__ import annotations

import mmap


def drop_pages(mapping: mmap.mmap) -> None:
    """Take the pages of a read-only mapping out of this process's memory. The next read brings them back."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)
