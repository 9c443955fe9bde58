"""A model of the Gluon operations our kernels use, on CPU threads: Gluon itself has no interpreter.

`modelled(path)` runs a kernel's file against it. Partitions of warps are threads; barriers count arrivals and
bytes as mbarriers do; a product that was started is computed when it is awaited, from what shared memory
holds then. So a stage freed too early, a wrong phase or a deadlock shows; layouts and registers do not.
"""

from __future__ import annotations

import sys
import threading
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 20.0
GLUON = "triton.experimental.gluon"


class Pointer:
    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = type("PointerType", (), {"element_ty": flat.dtype})

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.offset + offset)


def load(pointer: Pointer, mask: Any = True, other: float = 0) -> Tensor:
    offset = torch.as_tensor(pointer.offset)
    mask = torch.as_tensor(mask).expand(offset.shape)
    values = pointer.flat[torch.where(mask, offset, 0)]
    return torch.where(mask, values, torch.tensor(other, dtype=values.dtype))


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    mask = mask.expand(value.shape)
    pointer.flat[pointer.offset[mask]] = value[mask]


class Shared:
    """Shared memory; poisoned, so that what was never written shows.

    A tile of 128 columns of two bytes lies as two halves of 64 columns, one after the other: as the swizzled
    layout of the tensor cores has it. `halves` is such a view.
    """

    def __init__(self, data: Any, halves: bool = False, flipped: bool = False) -> None:
        self.data, self.halves, self.flipped = data, halves, flipped

    def index(self, index: Any) -> Any:
        part = self.data[int(index)]
        return Shared(part, self.halves) if isinstance(part, Tensor) else part

    def permute(self, order: tuple[int, ...]) -> Shared:
        assert order == (1, 0)
        return Shared(self.data, self.halves, not self.flipped)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: None) -> Shared:
        *outer, rows, columns = shape
        assert columns == 128
        return Shared(self.data.view(*outer, 2, rows, 64), halves=True)

    def load(self, layout: None = None) -> Tensor:
        data = torch.cat(list(self.data), dim=-1) if self.halves else self.data.clone()
        return data.T if self.flipped else data

    def store(self, value: Tensor) -> None:
        self.data.copy_(torch.stack(value.split(64, dim=-1)) if self.halves else value)


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all expected bytes have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def change(self, arrivals: int, bytes: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += bytes
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == self.bytes == 0:
                self.phase ^= 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != phase, PATIENCE_S):
                raise TimeoutError("a barrier was never passed")


class Product:
    """a · b + acc, computed when awaited."""

    def __init__(self, a: Any, b: Shared, acc: Any) -> None:
        self.parts = (a, b, acc)

    def value(self) -> Tensor:
        a, b, acc = self.parts
        a = a.load() if isinstance(a, Shared) else a
        acc = acc.value() if isinstance(acc, Product) else acc
        found = a.float() @ b.load().float()
        assert acc.shape == found.shape
        return acc + found


class Kernel:
    """A jitted function: called by others, or launched over a grid with tensors as its arguments."""

    def __init__(self, function: Any, place: SimpleNamespace) -> None:
        self.function, self.place = function, place

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            self.place.programs = grid
            pointers = [Pointer(arg.view(-1)) if isinstance(arg, Tensor) else arg for arg in args]
            for place in product(*map(range, grid)):
                self.place.program = place
                self.function(*pointers, **constants)

        return launch


def warp_specialize(partitions: list[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    failures: list[BaseException] = []

    def run(function: Any, args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=partition, daemon=True) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class Descriptor:
    def __init__(
        self, base: Tensor, shape: list[int], strides: list[int], box: list[int], layout: None
    ) -> None:
        self.data, self.box = base.view(shape), box


def copy_by_tma(source: Descriptor, place: list[Any], barrier: Barrier, target: Shared) -> None:
    window = tuple(
        slice(int(begin), int(begin) + size) for begin, size in zip(place, source.box, strict=True)
    )
    part = torch.zeros(source.box, dtype=source.data.dtype)
    found = source.data[window]
    part[tuple(map(slice, found.shape))] = found
    target.store(part)
    barrier.change(0, -part.numel() * part.element_size())


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    if layout == "barriers":
        return Shared([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def start(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def awaited(num_outstanding: int, deps: list[Any]) -> Any:
    values = [part.value() if isinstance(part, Product) else part for part in deps]
    return values[0] if len(values) == 1 else tuple(values)


def _modules() -> dict[str, ModuleType]:
    place = SimpleNamespace()

    def jit(function: Any = None, **options: Any) -> Any:
        return (lambda f: Kernel(f, place)) if function is None else Kernel(function, place)

    def nothing(*args: Any, **options: Any) -> None:
        return None

    def module(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(content)
        return made

    layouts = (
        "NVMMASharedLayout",
        "NVMMADistributedLayout",
        "DotOperandLayout",
        "SliceLayout",
        "BlockedLayout",
    )
    language = module(
        f"{GLUON}.language",
        **dict.fromkeys((*layouts, "thread_barrier"), nothing),
        constexpr=lambda value: value,
        int64=torch.int64,
        float32=torch.float32,
        program_id=lambda axis: place.program[axis],
        num_programs=lambda axis: place.programs[axis],
        arange=lambda begin, end, layout: torch.arange(begin, end),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        where=lambda mask, a, b: torch.where(torch.as_tensor(mask), a, b),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2,
        convert_layout=lambda x, layout: x,
        static_range=range,
        load=load,
        store=store,
        allocate_shared_memory=allocate,
        warp_specialize=warp_specialize,
    )
    barriers = module(
        "mbarrier",
        MBarrierLayout=lambda: "barriers",
        init=start,
        expect=lambda barrier, bytes: barrier.change(1, bytes),
        arrive=lambda barrier: barrier.change(1, 0),
        wait=lambda barrier, phase, pred=True: barrier.wait(int(phase)) if pred else None,
    )
    hopper = module(
        f"{GLUON}.language.nvidia.hopper",
        fence_async_shared=nothing,
        mbarrier=barriers,
        tma=module("tma", async_copy_global_to_shared=copy_by_tma),
        warpgroup_mma=lambda a, b, acc, use_acc=True, is_async=True: Product(
            a, b, acc if use_acc else torch.zeros_like(acc)
        ),
        warpgroup_mma_wait=awaited,
    )
    return {
        GLUON: module(GLUON, jit=jit, language=language),
        f"{GLUON}.language": language,
        f"{GLUON}.language.nvidia.hopper": hopper,
        f"{GLUON}.nvidia.hopper": module(f"{GLUON}.nvidia.hopper", TensorDescriptor=Descriptor),
        "triton.experimental": module("triton.experimental", gluon=module(GLUON, jit=jit, language=language)),
    }


def modelled(path: str) -> dict[str, Any]:
    """The names of a kernel's file, with Gluon replaced by this model."""
    content: dict[str, Any] = {"__name__": "modelled"}
    replaced = _modules()
    kept = {name: sys.modules.get(name) for name in replaced}
    sys.modules.update(replaced)
    try:
        exec(compile(Path(path).read_text(), path, "exec"), content)
    finally:
        for name, previous in kept.items():
            if previous is None:
                del sys.modules[name]
            else:
                sys.modules[name] = previous
    return content
