"""Loads Triton and cuBLAS in threads during a GPU engine's start.

Used by `cuda_build`. Nothing here can fail the start: what is not preloaded is loaded on first use.
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


def preload_compiler() -> None:
    """The one-time work of Triton that needs no torch: a fingerprint of itself (it reads its whole library),
    and the C part of its driver. Both are private: if they are not found, the first kernel pays for them."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def preload_cublas(dtype: torch.dtype) -> None:
    """Load cuBLAS and its kernels while the weights load. Its workspace is released."""
    import torch

    with contextlib.suppress(Exception):  # the first step reports it
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(stream):
            for size in (1024, 128):
                square = torch.zeros(size, size, dtype=dtype, device="cuda")
                torch.mm(square[:8], square)
        stream.synchronize()
        del square
        clear_cublas()


def clear_cublas() -> None:
    """Release the workspaces of all streams that used cuBLAS; streams that continue get new ones."""
    import torch

    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def log_errors(errors: list[Exception]) -> None:
    """One line for all of them, with the first in full."""
    if errors:
        log.warning("could not compile %d kernels ahead", len(errors), exc_info=errors[0])


def in_thread(target: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread
