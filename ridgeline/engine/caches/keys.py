"""The keys of shipped caches: everything that makes packed weights or compiled kernels valid on a machine.

A cache is used where every field is equal, and refused by the fields that differ. Nothing heavy is imported:
versions come from installed metadata and files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

from ridgeline.engine.start.gpu_probe import Gpu, torch_cuda
from ridgeline.models.sources.file_hashes import file_sha256
from ridgeline.models.weights import packed_cache
from ridgeline.ops.cpu.interface import LIBRARY_PATH
from ridgeline.ops.cpu.library import choose_isa
from ridgeline.version import __version__

Key = dict[str, str]
DRIVER_VERSION = Path("/sys/module/nvidia/version")


def packed_key(path: Path, weights: str) -> Key:
    """Of packed weights of this checkpoint. NativeUnavailable, OSError or ModelError where there are none."""
    files = sha256()
    for file in packed_cache.source_files(path):
        files.update(bytes.fromhex(file_sha256(file)))
    machine = packed_cache.machine_key()
    return {
        "instruction set": choose_isa(),
        "native library": file_sha256(LIBRARY_PATH)[:16],
        "packing": f"{machine['version']}.{machine['abi']}.{machine['layout'][:16]}",
        "ridgeline": __version__,
        "weights": weights,
        "files": files.hexdigest()[:32],
    }


def kernels_key(gpu: Gpu, driver: Path = DRIVER_VERSION) -> Key:
    """Of kernels that Triton compiled, and of the host code around them."""
    return {
        "GPU": gpu.name,
        "compute capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "driver": _driver(gpu, driver),
        "CUDA": _cuda(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "ridgeline": __version__,
        "python": f"{sys.implementation.cache_tag}-{platform.machine()}",
        "libc": "-".join(platform.libc_ver()),
    }


def _driver(gpu: Gpu, path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a container may hide it
        return f"for CUDA {gpu.driver_cuda[0]}.{gpu.driver_cuda[1]}"


@cache
def _cuda() -> str:
    torch = importlib.util.find_spec("torch")
    built = torch_cuda(Path(torch.origin).parent) if torch is not None and torch.origin else None
    return "none" if built is None else f"{built[0]}.{built[1]}"


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
