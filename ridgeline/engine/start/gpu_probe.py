"""Finds out whether there is a GPU that torch and triton can use, from the driver and files, without imports.

Used by the choice of a backend, before anything heavy is imported, and by `doctor`. Without a driver it
costs nothing; with one, it initialises the driver, which would happen a moment later anyway.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

DRIVER = "libcuda.so.1"
LEAST_CAPABILITY = (8, 0)  # bfloat16 in the tensor cores
FP8_CAPABILITY = (8, 9)
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first device visible to this process."""

    name: str
    total_bytes: int
    capability: tuple[int, int]
    driver_cuda: tuple[int, int]  # the newest CUDA version the driver supports

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores multiply FP8."""
        return self.capability >= FP8_CAPABILITY


def find_gpu() -> Gpu | None:
    """None if there is no driver, no device, or CUDA_VISIBLE_DEVICES hides them all."""
    try:
        cuda = ctypes.CDLL(DRIVER)
        return _first_gpu(cuda)
    except (OSError, AttributeError):  # no driver, or one without these functions
        return None


def make_context() -> bool:
    """Create the first device's context, which torch will use, and keep it. The driver releases the GIL, so
    this can run in a thread while torch is imported."""
    try:
        cuda = ctypes.CDLL(DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        return not (
            cuda.cuInit(0)
            or cuda.cuDeviceGet(ctypes.byref(device), 0)
            or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        )
    except (OSError, AttributeError):  # reported on first use
        return False


def _first_gpu(cuda: ctypes.CDLL) -> Gpu | None:
    count, device, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        return None
    if cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDriverGetVersion(ctypes.byref(version)):
        return None
    name, total = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, _NAME_BYTES, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    return Gpu(
        name=name.value.decode(errors="replace"),
        total_bytes=total.value,
        capability=(attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)),
        driver_cuda=(version.value // 1000, version.value % 1000 // 10),
    )


def why_not_usable(gpu: Gpu) -> str | None:
    """The reason why torch and triton cannot use this GPU; None if none is visible from here."""
    if gpu.capability < LEAST_CAPABILITY:
        return (
            f"the {gpu.name} has compute capability {_dotted(gpu.capability)}, "
            f"but at least {_dotted(LEAST_CAPABILITY)} is needed"
        )
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.origin:
        return "torch is not installed: pip install 'ridgeline[cuda]'"
    folder = Path(torch.origin).parent
    built_for = torch_cuda(folder)
    if built_for is None:
        return "this torch was built without CUDA: install the CUDA build of the same version"
    if gpu.driver_cuda[0] < built_for[0]:
        return (
            f"the driver supports CUDA {_dotted(gpu.driver_cuda)}, but torch was built for "
            f"{_dotted(built_for)}: update the driver or install torch for an older CUDA"
        )
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'ridgeline[cuda]'"
    return None


def torch_cuda(folder: Path) -> tuple[int, int] | None:
    """The CUDA version this torch installation was built for, from its version.py; None without CUDA."""
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return None if found is None else (int(found[1]), int(found[2]))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
