"""The receipt of a GPU's memory: planned and used bytes of each part, and the peaks.

Made by the backend at start and on request later; `serve` prints it. Sent from the engine process to the
server as plain numbers. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.engine.start.memory import MemoryPlan

GIB = 1 << 30
PARTS = {
    "weights": "weights",
    "kv": "KV cache",
    "activations": "activations",
    "drafter": "drafter",  # weights and activations
    "drafter_kv": "its KV cache",
    "graphs": "graphs",
    "libraries": "libraries",
}
OF_A_DRAFTER = ("drafter", "drafter_kv")  # not shown where there is none
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
            if part not in OF_A_DRAFTER or self.planned[part]
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


def planned_parts(plan: MemoryPlan, graph_bytes: int) -> dict[str, int]:
    """graph_bytes: of the served model; a draft model's are in its reserve"""
    return {
        "weights": plan.weights_bytes,
        "kv": plan.kv_bytes,
        "activations": plan.activation_bytes,
        "drafter": plan.drafter_bytes,
        "drafter_kv": plan.drafter_kv_bytes,
        "graphs": graph_bytes + plan.drafter_reserve_bytes,
        "libraries": plan.reserve_bytes - graph_bytes,
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
