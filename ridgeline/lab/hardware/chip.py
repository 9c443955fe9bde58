"""Chip: the peak rates of one accelerator, each with its source.

Made by `hardware.table` (published figures) and `hardware.this_machine` (measured ones); read by the planner.
All rates are dense: a figure with structured sparsity is twice what a served model can reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.models.spec.precision import format_name

CPU = "cpu"  # the name of this machine's processor
# Arithmetic that can multiply weights of a format, directly or after conversion.
UNITS: Mapping[str, tuple[str, ...]] = {
    "float32": ("fp32", "bf16"),
    "bfloat16": ("bf16", "fp32"),
    "float16": ("bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp32"),
    "int8": ("int8", "bf16", "fp32"),
    "int8-channel": ("int8", "bf16", "fp32"),
    "int4": ("bf16", "fp32"),  # only weights are 4-bit: they are converted before multiplication
    "nvfp4": ("fp4", "bf16", "fp32"),
    "mxfp4": ("fp4", "bf16", "fp32"),
}
GGUF_UNITS = ("int8", "bf16", "fp32")


@dataclass(frozen=True)
class Chip:
    name: str
    title: str  # as its maker calls it
    memory_bytes: int
    bytes_per_s: float  # of its memory
    # Dense operations per second: bf16, fp8, fp4, int8, fp32; absent = has none.
    flops: Mapping[str, float] = field(hash=False)
    link_bytes_per_s: float | None  # to each other chip of its node, per chip, one direction
    internode_bytes_per_s: float | None  # to another node, per chip, one direction
    gpus_per_node: int
    link_domain: int  # chips that reach each other at link speed; more than a node in rack-wide systems
    watts: float | None
    usd_per_hour: float | None  # to rent one, on demand
    sources: Mapping[str, str] = field(hash=False)  # by field, flops as "flops.bf16"

    def unit(self, weight_format: str) -> str:
        """The fastest arithmetic here that multiplies weights of this format."""
        known = format_name(weight_format)
        there = [unit for unit in UNITS.get(known, GGUF_UNITS) if unit in self.flops]
        if not there:
            raise ValueError(f"{self.name}: no arithmetic is known for {known} weights")
        return max(there, key=lambda unit: self.flops[unit])

    def flops_per_s(self, weight_format: str) -> float:
        return self.flops[self.unit(weight_format)]

    def ridge(self, weight_format: str) -> float:
        """Operations per byte at which memory and arithmetic take equally long."""
        return self.flops_per_s(weight_format) / self.bytes_per_s
