"""StepBlock: the one block of integers that a step sends to the device, and the offsets of its parts.

Filled in page-locked host memory, with buffers used in rotation so that a pending copy is never overwritten,
and uploaded with one asynchronous copy. Parts are aligned to 64 bytes, so that kernels see one alignment and
are compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence as Numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGN = 16  # 4-byte integers
_RING_SIZE = 3

Ints = np.ndarray[Any, np.dtype[np.int32]]


def aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


class StepBlock:
    def __init__(self, capacity: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = torch.zeros(aligned(capacity), dtype=torch.int32, device=device)
        self._hosts = [
            torch.zeros(aligned(capacity), dtype=torch.int32, pin_memory=on_gpu) for _ in range(_RING_SIZE)
        ]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._copied: list[torch.cuda.Event | None] = [None] * _RING_SIZE
        self._slot = 0
        self._used = 0

    def begin(self) -> None:
        """Start the block of a new step."""
        self._slot = (self._slot + 1) % _RING_SIZE
        self._used = 0
        copied = self._copied[self._slot]
        if copied is not None:
            copied.synchronize()  # nearly always long done

    def put(self, values: Numbers[int] | Ints, room: int | None = None, fill: int = 0) -> int:
        """Append a part and return its offset; `room` numbers are reserved for it, filled up with `fill`."""
        first, count = self._used, len(values)
        end = first + aligned(max(count, room or 0))
        array = self._arrays[self._slot]
        if end > len(array):
            raise ValueError(f"the step needs {end} integers; the block holds {len(array)}")
        array[first : first + count] = values
        array[first + count : end] = fill
        self._used = end
        return first

    def view(self, first: int, count: int) -> Tensor:
        """A part as the device sees it after `upload`."""
        return self.device[first : first + count]

    def upload(self) -> None:
        host = self._hosts[self._slot]
        self.device[: self._used].copy_(host[: self._used], non_blocking=True)
        if self.device.is_cuda:
            event = self._copied[self._slot]
            if event is None:
                event = self._copied[self._slot] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
