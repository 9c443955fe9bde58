"""DeviceMemory: a GPU's memory as torch and the driver report it, for the plan and its receipt."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.engine.start.memory_receipt import MemoryReceipt


class DeviceMemory:
    """Observed at the points of a start that separate its parts."""

    def __init__(self) -> None:
        self.name = ""
        self.free_at_start = 0
        self._allocated: dict[str, int] = {}
        self._reserved_when_built = 0
        self._drafter_kv_bytes: Callable[[], int] = lambda: 0
        self._drafter_kv_when_built = 0

    def open(self) -> None:
        """Create the context. The memory free after this is planned."""
        import torch

        torch.cuda.set_device(0)  # creates the context
        self.name = torch.cuda.get_device_name()
        self.free_at_start = torch.cuda.mem_get_info()[0]

    def mark(self, moment: str) -> None:
        import torch

        self._allocated[moment] = torch.cuda.memory_allocated()
        self._reserved_when_built = torch.cuda.memory_reserved()

    def count_drafter(self, kv_bytes: Callable[[], int]) -> None:
        """The drafter is built, the last part of a start. kv_bytes: of its cache now; it may grow."""
        self._drafter_kv_bytes, self._drafter_kv_when_built = kv_bytes, kv_bytes()
        self.mark("drafter")

    def receipt(self, planned: dict[str, int], kv_bytes: int) -> MemoryReceipt:
        import torch

        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        start, weights, runner = (self._allocated[moment] for moment in ("start", "weights", "runner"))
        drafter = self._allocated.get("drafter", runner) - runner - self._drafter_kv_when_built
        drafter_kv = self._drafter_kv_bytes()
        since_built = reserved - self._reserved_when_built - (drafter_kv - self._drafter_kv_when_built)
        observed = {
            "weights": weights - start,
            "kv": kv_bytes,
            "activations": max(runner - weights - kv_bytes, 0),
            "drafter": max(drafter, 0),
            "drafter_kv": drafter_kv,
            "graphs": max(since_built, 0),
            "libraries": max(self.free_at_start - free - reserved, 0),
        }
        return MemoryReceipt(
            planned=planned,
            observed=observed,
            peak_tensor_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            device_free_bytes=free,
            device_total_bytes=total,
        )
