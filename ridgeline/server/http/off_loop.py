"""off_loop: large data is read and written in a thread, because the event loop carries all streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LONG_BYTES = 16_384  # about 1 ms of encoding or decoding; more would delay all streams
# Two threads: more would not be faster, as they compete with the event loop for the GIL.
_long_work = ThreadPoolExecutor(2, "ridgeline-long-work")


async def off_loop(size_bytes: int, work: Callable[[], T]) -> T:
    """Run `work` directly for small data, otherwise in a thread, so that it does not block streams."""
    if size_bytes <= LONG_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_long_work, work)
