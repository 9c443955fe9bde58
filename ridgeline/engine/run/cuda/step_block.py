"""StepBlock: the one block of integers that a step sends to the device, and where its parts lie.

Filled in page-locked host memory, in turns so that the copy of an earlier step is never overwritten; uploaded
with one asynchronous copy. Parts begin at multiples of 64 bytes: kernels see one alignment, and are compiled
once.
"""

from __future__ import annotations

from collections.abc import Sequence as Numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGN = 16  # numbers of 4 bytes
_TURNS = 3

Ints = np.ndarray[Any, np.dtype[np.int32]]


def aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


class StepBlock:
    def __init__(self, capacity: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = torch.zeros(aligned(capacity), dtype=torch.int32, device=device)
        self._hosts = [
            torch.zeros(aligned(capacity), dtype=torch.int32, pin_memory=on_gpu) for _ in range(_TURNS)
        ]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._copied: list[torch.cuda.Event | None] = [None] * _TURNS
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """Start the block of a new step."""
        self._turn = (self._turn + 1) % _TURNS
        self._used = 0
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # nearly always long done

    def put(self, values: Numbers[int] | Ints, room: int | None = None, fill: int = 0) -> int:
        """Append a part and return where it begins; `room` numbers are kept for it, the rest is `fill`."""
        first, count = self._used, len(values)
        end = first + aligned(max(count, room or 0))
        array = self._arrays[self._turn]
        if end > len(array):
            raise ValueError(f"a step's integers do not fit: {end} of {len(array)}")
        array[first : first + count] = values
        array[first + count : end] = fill
        self._used = end
        return first

    def view(self, first: int, count: int) -> Tensor:
        """A part as the device will see it after `upload`."""
        return self.device[first : first + count]

    def upload(self) -> None:
        host = self._hosts[self._turn]
        self.device[: self._used].copy_(host[: self._used], non_blocking=True)
        if self.device.is_cuda:
            event = self._copied[self._turn]
            if event is None:
                event = self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
