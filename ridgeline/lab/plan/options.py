"""PlanOptions: what a plan is asked beside its model and traffic, declared once for flags and docs.

Apart from what answers, so that a parser of flags imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import option

DEFAULT_SLO = "ttft_p90=2s,tpot_p90=100ms"  # an answer begins soon and comes faster than one reads
GPUS_MAX = 64


@dataclass(frozen=True, slots=True)
class PlanOptions:
    hardware: str = option(
        "cpu",
        "a chip by name (docs/hardware.md), or cpu: this machine, measured; or several: h100,h200",
    )
    gpus_max: int | None = option(None, f"most chips in all; default: {GPUS_MAX}, of cpu one")
    slo: str | None = option(None, f"limits: ttft_p90=400ms,tpot_p90=50ms; default: {DEFAULT_SLO}")
    budget: str | None = option(None, "most to be paid: $5000/month, $0.40/Mtok or $0.01/request")
    engine: Literal["auto", "ridgeline", "vllm", "sglang", "trtllm"] = option(
        "auto", "what serves; auto is ridgeline where it can, else vllm"
    )
    precision: str | None = option(None, "of weights: bfloat16, fp8, int8, int4 …; default: as stored")
    kv_precision: str = option("bfloat16", "of keys and values")
    set: tuple[str, ...] = option((), "KEY=VALUE: a setting of the engine to plan with; may be repeated")
    gpu_price: float | None = option(None, "dollars for a chip and hour; default: the hardware table's")
    hosted: str | None = option(
        None, "hosted model to compare with: MODEL or PROVIDER/MODEL; default: the same"
    )
    price_in: float | None = option(None, "its dollars per million input tokens; default: genai-prices'")
    price_out: float | None = option(None, "per million output tokens")
    price_cached: float | None = option(None, "per million input tokens that its cache has")
    busy_hours: float = option(24.0, "hours of a day with this traffic, where it is shorter than a day")
    users: float | None = option(None, "how many share the bill, for the cost of each")
