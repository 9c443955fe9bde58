"""Kernel launches written down instead of made, so that kernels can be compiled before they are needed.

A step run over tensors of the "meta" device, inside `recorded`, launches nothing and computes nothing; what
it would have launched is compiled afterwards, in threads: Triton's compiler lets go of Python's lock.
With the kernel comes its launcher, which Triton has a C compiler build for each signature.
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

_active = threading.local()  # .launches: the list to write to, in a thread that records


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
        """Into Triton's caches, in memory and on disk; from the disk if it is there. Then onto the device."""
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
    """Compile for a GPU of this capability from now on, and open none: kernels and launchers go to the disk
    alone. For a process that launches nothing."""
    driver.set_active(_UnopenedGpu(capability))


def compile_all(launches: Iterable[Launch], threads: int = 16) -> list[Exception]:
    """Compile them all; returns what went wrong, and never raises it.

    The threads are daemons of their own, not a pool's: Python would wait at its end for all a pool has to do.
    """
    wanted = list(launches)
    device = _device()
    for kernel in {launch.kernel for launch in wanted}:
        kernel.device_caches[device]  # made here: two threads would make two, and lose what is in one
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
    """What Triton asks its driver for to compile; so a kernel's key on disk is what it is beside the GPU."""

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
        if func is torch.cat and len(args) == 1 and args[0][0].is_meta:
            return args[0][0].new_empty(sum(map(len, args[0])), *args[0][0].shape[1:])
        return func(*args, **(kwargs or {}))


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


def _device() -> Any:
    """The number of the current device. Makes Triton's driver, which has a C compiler run the first time."""
    return driver.active.get_current_device()


def _enter_thread() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.set_device(torch.cuda.current_device())  # the context is a thread's own matter


def _load(kernel: Any) -> None:
    """Build the kernel's launcher and load its code, as its first launch would, each kernel in its turn.

    On a copy: an unfinished kernel must not be seen by a thread that launches it. `_run` is what a launch
    looks at first, so it comes last. Without Triton's method for it (it is private) the first launch does it.
    """
    initialise = "_init_handles"
    if not hasattr(kernel, initialise) or getattr(kernel, "_run", None) is not None:
        return
    if not torch.cuda.is_initialized():  # a process that opens no GPU
        with contextlib.suppress(Exception):  # without a C compiler, say: the kernel alone is what takes long
            CudaLauncher(kernel.src, kernel.metadata)
        return
    twin = copy.copy(kernel)
    getattr(twin, initialise)()
    found = dict(vars(twin))
    run = found.pop("_run", None)
    vars(kernel).update(found)
    kernel._run = run


def _kind(value: Any, parameter: Any) -> Any:
    """What Triton compiles for: types, and of whole numbers whether they are 1 or a multiple of 16."""
    if parameter is None or parameter.is_constexpr:  # an option, as num_warps
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
