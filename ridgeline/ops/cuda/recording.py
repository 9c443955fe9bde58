"""Records kernel launches instead of making them, so that kernels can be compiled before they are needed.

A step run over tensors of the "meta" device, inside `recorded`, launches and computes nothing; what it would
have launched is compiled afterwards, in threads: Triton's compiler releases the GIL. The launcher, which
Triton builds with a C compiler for each signature, is compiled with the kernel.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_active = threading.local()  # .launches: the list to append to, in a recording thread


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def variant(self) -> tuple[Any, ...]:
        """Equal for launches that need the same compiled kernel (rarely, unequal ones do too)."""
        parameters = {parameter.name: parameter for parameter in self.kernel.params}
        given = dict(zip(parameters, self.args, strict=False)) | self.options
        return self.kernel, *((name, _kind(value, parameters.get(name))) for name, value in given.items())

    def compile(self) -> None:
        """Compile into Triton's memory and disk caches, or load from disk; then load onto the device."""
        _load(self.kernel.run(*self.args, grid=(1,), warmup=True, **self.options))


def recorded(run: Callable[[], object]) -> list[Launch]:
    """What `run` launches, each variant once."""
    _install()
    launches: list[Launch] = []
    _active.launches = launches
    try:
        with _WithoutShapeChecks():
            run()
    finally:
        _active.launches = None
    return distinct(launches)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """Each variant once, in the order of their first launches."""
    found: dict[tuple[Any, ...], Launch] = {}
    for launch in launches:
        found.setdefault(launch.variant, launch)
    return list(found.values())


def compile_for(capability: int) -> None:
    """Compile for a GPU of this capability from now on, without opening one: kernels and launchers are only
    written to disk. For a process that launches nothing."""
    driver.set_active(_UnopenedGpu(capability))


def compile_all(launches: Iterable[Launch], threads: int = 16) -> list[Exception]:
    """Compile them all; returns the errors and never raises.

    Uses daemon threads, not a pool: at exit Python would wait for all of a pool's tasks.
    """
    wanted = list(launches)
    device = _device()
    for kernel in {launch.kernel for launch in wanted}:
        # Created here: two threads would create two, and lose the content of one.
        kernel.device_caches[device]
    queue, lock = iter(wanted), threading.Lock()
    errors: list[Exception] = []

    def work() -> None:
        _enter_thread()
        while True:
            with lock:
                launch = next(queue, None)
            if launch is None:
                return
            try:
                launch.compile()
            except Exception as error:
                errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(wanted)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return errors


class _UnopenedGpu:
    """The part of Triton's driver needed to compile. A kernel's key on disk is the same as with a GPU."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _WithoutShapeChecks(TorchFunctionMode):
    """Products and concatenations of "meta" tensors, done here: torch's own import half of its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.mm, torch.addmm) and "out" in (kwargs or {}) and args[0].is_meta:
            return kwargs["out"]
        if func is torch._scaled_mm and "out" in (kwargs or {}) and args[0].is_meta:
            return kwargs["out"]
        if func is torch.cat and len(args) == 1 and args[0][0].is_meta:
            return args[0][0].new_empty(sum(map(len, args[0])), *args[0][0].shape[1:])
        return func(*args, **(kwargs or {}))


def _install() -> None:
    """Patch JITFunction.run to check whether its thread records. Once; other threads launch as usual."""
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


def _device() -> Any:
    """The number of the current device. Creates Triton's driver, which first runs a C compiler."""
    return driver.active.get_current_device()


def _enter_thread() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.set_device(torch.cuda.current_device())  # the context is per thread


def _load(kernel: Any) -> None:
    """Build the kernel's launcher and load its code, as its first launch would, one kernel at a time.

    On a copy: a launching thread must not see an unfinished kernel. A launch checks `_run` first, so it is
    set last. Without Triton's method for it (it is private) the first launch does it.
    """
    initialise = "_init_handles"
    if not hasattr(kernel, initialise) or getattr(kernel, "_run", None) is not None:
        return
    if not torch.cuda.is_initialized():  # a process that opens no GPU
        # For example without a C compiler: compiling the kernel is what takes long.
        with contextlib.suppress(Exception):
            CudaLauncher(kernel.src, kernel.metadata)
        return
    twin = copy.copy(kernel)
    getattr(twin, initialise)()
    found = dict(vars(twin))
    run = found.pop("_run", None)
    vars(kernel).update(found)
    kernel._run = run


def _kind(value: Any, parameter: Any) -> Any:
    """Triton's compilation key: types, and for integers whether they are 1 or a multiple of 16."""
    if parameter is None or parameter.is_constexpr:  # an option such as num_warps
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, parameter.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if parameter.do_not_specialize:
            return "int"
        return "int", value == 1, value % 16 == 0, value.bit_length() > 31
    if isinstance(value, float):
        return "float"
    if isinstance(value, tuple):
        return tuple(_kind(part, parameter) for part in value)
    base = getattr(value, "base", None)  # of a tensor descriptor
    return getattr(base, "dtype", type(value)), repr(getattr(value, "block_shape", value))
