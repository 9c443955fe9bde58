"""A GPU's peak read and matmul rates: measured once in a few milliseconds, then cached by device name.

Used as limits for measured figures, and by `doctor`. Measuring needs torch with CUDA; reading the cache
does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from ridgeline.engine.limits.machine_limits import DeviceCeilings
from ridgeline.machine import cache_dir

READ_BYTES = 1 << 30  # many times the caches of any device
MATMUL_SIZES = (8192, 4096, 2048)  # the largest that fits in free memory
REPEATS = 8

Measure = Callable[[str], DeviceCeilings]


def device_ceilings(device_name: str, dtype: str, measure: Measure | None = None) -> DeviceCeilings:
    """The cached ceilings of this device and dtype, or measured now and cached."""
    place = ceilings_path(device_name, dtype)
    kept = _kept(place)
    if kept is not None:
        return kept
    found = (measure or measure_ceilings)(dtype)
    _keep(place, found)
    return found


def ceilings_path(device_name: str, dtype: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return cache_dir() / "gpu-limits" / f"{slug}-{dtype}.json"


def measure_ceilings(dtype: str) -> DeviceCeilings:
    """On the current device. The best of several repeats: interference only lowers a measured ceiling."""
    import torch

    free = torch.cuda.mem_get_info()[0]
    found = DeviceCeilings(
        _read_rate(min(READ_BYTES, free // 4)), _matmul_rate(getattr(torch, dtype), free // 2)
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # not the model's memory
    return found


def _read_rate(nbytes: int) -> float:
    import torch

    buffer = torch.ones(nbytes // 4, dtype=torch.float32, device="cuda")
    return buffer.nbytes / _best_seconds(lambda: buffer.sum())


def _matmul_rate(dtype: object, most_bytes: int) -> float:
    import torch

    assert isinstance(dtype, torch.dtype)
    size = next((s for s in MATMUL_SIZES if 3 * s * s * dtype.itemsize < most_bytes), MATMUL_SIZES[-1])
    # Random: a device multiplies zeros faster than a model's weights.
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(a, b, out=out))


def _best_seconds(work: Callable[[], object]) -> float:
    import torch

    work()  # loads the libraries
    best = float("inf")
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def _kept(place: Path) -> DeviceCeilings | None:
    try:
        values = json.loads(place.read_text(encoding="utf-8"))
        found = DeviceCeilings(float(values["read_bytes_per_s"]), float(values["flops_per_s"]))
    except (OSError, ValueError, KeyError, TypeError):  # missing or unreadable
        return None
    return found if found.read_bytes_per_s > 0 and found.flops_per_s > 0 else None


def _keep(place: Path, found: DeviceCeilings) -> None:
    """Write atomically. A cache that cannot be written costs the next start a few milliseconds."""
    text = json.dumps({"read_bytes_per_s": found.read_bytes_per_s, "flops_per_s": found.flops_per_s})
    draft = place.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)
