"""What goes on beside a GPU engine's start, in threads: Triton and cuBLAS are woken.

Used by `cuda_build`. Nothing here can fail the start: what is not done beforehand is done when it is needed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def wake_compiler() -> None:
    """What Triton does once and needs no torch for: a fingerprint of itself (it reads its whole library), and
    the C part of its driver. Both are private: where they are not found, the first kernel waits for them."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def wake_cublas(dtype: torch.dtype) -> None:
    """Have cuBLAS load itself and its kernels beside the weights. Its workspace is given back."""
    import torch

    with contextlib.suppress(Exception):  # the first step tells
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(stream):
            for size in (1024, 128):
                square = torch.zeros(size, size, dtype=dtype, device="cuda")
                torch.mm(square[:8], square)
        stream.synchronize()
        del square
        clear_cublas()


def clear_cublas() -> None:
    """Give back the workspace of every stream that multiplied so far; those that go on get new ones."""
    import torch

    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def tell_errors(errors: list[Exception]) -> None:
    """One line for all of them, with the first in full."""
    if errors:
        log.warning("%d kernels could not be compiled beforehand", len(errors), exc_info=errors[0])


def in_thread(target: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread
