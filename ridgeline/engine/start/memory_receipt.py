"""The receipt of a GPU's memory: planned and used bytes of each part, and the peaks.

Made by the backend at start and on request later; `serve` prints it. Sent from the engine process to the
server as plain numbers. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30
PARTS = {
    "weights": "weights",
    "kv": "KV cache",
    "activations": "activations",
    "graphs": "graphs",
    "libraries": "libraries",
}
PLANNED = "planned_"


@dataclass(frozen=True, slots=True)
class MemoryReceipt:
    planned: dict[str, int]  # by part
    observed: dict[str, int]
    peak_tensor_bytes: int  # peak of all tensors together
    peak_reserved_bytes: int  # peak of the allocator's reservation on the device
    device_free_bytes: int
    device_total_bytes: int

    def lines(self) -> list[str]:
        """Planned and used, in GiB, for display."""
        parts = [
            f"{name} {self.observed[part] / GIB:.2f} (planned {self.planned[part] / GIB:.2f})"
            for part, name in PARTS.items()
        ]
        return [
            " · ".join(parts) + " GiB",
            f"peak {self.peak_tensor_bytes / GIB:.2f} of {self.peak_reserved_bytes / GIB:.2f} GiB held · "
            f"device {self.device_free_bytes / GIB:.2f} of {self.device_total_bytes / GIB:.2f} GiB free",
        ]

    def as_bytes(self) -> dict[str, int]:
        """Flat, as in the start-up budget's bytes."""
        return {
            **self.observed,
            **{PLANNED + part: size for part, size in self.planned.items()},
            "peak_tensors": self.peak_tensor_bytes,
            "peak_reserved": self.peak_reserved_bytes,
            "device_free": self.device_free_bytes,
            "device_total": self.device_total_bytes,
        }


def receipt_of(sizes: Mapping[str, int]) -> MemoryReceipt | None:
    """The receipt that `as_bytes` flattened; None if these are another backend's bytes."""
    if "device_total" not in sizes:
        return None
    return MemoryReceipt(
        planned={part: sizes[PLANNED + part] for part in PARTS},
        observed={part: sizes[part] for part in PARTS},
        peak_tensor_bytes=sizes["peak_tensors"],
        peak_reserved_bytes=sizes["peak_reserved"],
        device_free_bytes=sizes["device_free"],
        device_total_bytes=sizes["device_total"],
    )
