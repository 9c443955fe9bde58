"""Kernel launches written down instead of made, so that kernels can be compiled before they are needed.

A step run over tensors of the "meta" device, inside `recorded`, launches nothing and computes nothing; what
it would have launched is compiled afterwards, in several threads: Triton's compiler lets go of Python's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

_active = threading.local()  # .launches: the list to write to, in a thread that records


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def variant(self) -> tuple[Any, ...]:
        """Equal for launches that need the same compiled kernel (rarely, unequal ones do too)."""
        values = [
            value if parameter.is_constexpr else _kind(value)
            for value, parameter in zip(self.args, self.kernel.params, strict=False)
        ]
        return (
            self.kernel,
            *values,
            *((name, _kind_or_value(value)) for name, value in self.options.items()),
        )

    def compile(self) -> None:
        """Into Triton's caches, in memory and on disk; from the disk if it is there."""
        self.kernel.run(*self.args, grid=(1,), warmup=True, **self.options)


def recorded(run: Callable[[], object]) -> list[Launch]:
    """What `run` launches, each variant once."""
    _install()
    launches: list[Launch] = []
    _active.launches = launches
    try:
        run()
    finally:
        _active.launches = None
    return list({launch.variant: launch for launch in launches}.values())


def compile_all(launches: Iterable[Launch], threads: int = 8) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(Launch.compile, launches))


def _install() -> None:
    """Let JITFunction.run look whether its thread records. Once; other threads launch as ever."""
    original = JITFunction.run
    if getattr(original, "records", False):
        return

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launches = getattr(_active, "launches", None)
        if launches is None or warmup:
            return original(self, *args, grid=grid, warmup=warmup, **options)
        launches.append(Launch(self, args, options))
        return None

    run.records = True  # type: ignore[attr-defined]
    JITFunction.run = run


def _kind(value: Any) -> Any:
    """What Triton compiles for: types, and of whole numbers whether they are 1 or a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return "int", value == 1, value % 16 == 0
    if isinstance(value, float):
        return "float"
    return repr(getattr(value, "block_shape", value))


def _kind_or_value(value: Any) -> Any:
    return _kind(value) if isinstance(value, torch.Tensor | float) else value
