"""What a GPU can read and multiply at most: measured once in some milliseconds, then kept for its name.

For the limits that figures stand beside, and for `doctor`. Needs torch with CUDA to measure, nothing to look
up what was kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from ridgeline.engine.limits.machine_limits import Ceilings
from ridgeline.machine import cache_dir

READ_BYTES = 1 << 30  # many times the caches of any device
MATMUL_SIZES = (8192, 4096, 2048)  # the largest that fits well in what is free
REPEATS = 8

Measure = Callable[[str], Ceilings]


def device_ceilings(device_name: str, dtype: str, measure: Measure | None = None) -> Ceilings:
    """The ceilings kept for this device and dtype, else measured now and kept."""
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


def measure_ceilings(dtype: str) -> Ceilings:
    """On the current device. The best of some repeats: interference only ever makes a ceiling look lower."""
    import torch

    free = torch.cuda.mem_get_info()[0]
    found = Ceilings(_read_rate(min(READ_BYTES, free // 4)), _matmul_rate(getattr(torch, dtype), free // 2))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # this is not the model's
    return found


def _read_rate(nbytes: int) -> float:
    import torch

    buffer = torch.ones(nbytes // 4, dtype=torch.float32, device="cuda")
    return buffer.nbytes / _best_seconds(lambda: buffer.sum())


def _matmul_rate(dtype: object, most_bytes: int) -> float:
    import torch

    assert isinstance(dtype, torch.dtype)
    size = next((s for s in MATMUL_SIZES if 3 * s * s * dtype.itemsize < most_bytes), MATMUL_SIZES[-1])
    # Random: a device multiplies zeros faster than it ever multiplies a model.
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(a, b, out=out))


def _best_seconds(work: Callable[[], object]) -> float:
    import torch

    work()  # libraries are loaded by their first use
    best = float("inf")
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def _kept(place: Path) -> Ceilings | None:
    try:
        values = json.loads(place.read_text(encoding="utf-8"))
        found = Ceilings(float(values["read_bytes_per_s"]), float(values["flops_per_s"]))
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not ours
        return None
    return found if found.read_bytes_per_s > 0 and found.flops_per_s > 0 else None


def _keep(place: Path, found: Ceilings) -> None:
    """Whole or not at all; a cache that cannot be written costs the next start some milliseconds."""
    text = json.dumps({"read_bytes_per_s": found.read_bytes_per_s, "flops_per_s": found.flops_per_s})
    draft = place.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)
