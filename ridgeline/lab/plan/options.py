"""PlanOptions: the options of a plan besides model and traffic, declared once for flags and docs.

A separate module, so that the flag parser imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import option

DEFAULT_SLO = "ttft_p90=2s,tpot_p90=100ms"  # a prompt start, and faster than reading speed
GPUS_MAX = 64


@dataclass(frozen=True, slots=True)
class PlanOptions:
    hardware: str = option(
        "cpu",
        "chip name (docs/hardware.md), cpu for this machine, or several: h100,h200",
    )
    gpus_max: int | None = option(None, f"maximum number of chips; default: {GPUS_MAX}, for cpu 1")
    slo: str | None = option(None, f"limits: ttft_p90=400ms,tpot_p90=50ms; default: {DEFAULT_SLO}")
    budget: str | None = option(None, "maximum cost: $5000/month, $0.40/Mtok or $0.01/request")
    engine: Literal["auto", "ridgeline", "vllm", "sglang", "trtllm"] = option(
        "auto", "serving engine; auto: ridgeline if it can, else vllm"
    )
    precision: str | None = option(
        None, "precision of weights: bfloat16, fp8, int8, int4 …; default: as stored"
    )
    kv_precision: str = option("bfloat16", "precision of keys and values")
    set: tuple[str, ...] = option((), "KEY=VALUE: engine setting to plan with; may be repeated")
    gpu_price: float | None = option(None, "dollars per chip and hour; default: from the hardware table")
    hosted: str | None = option(
        None, "hosted model to compare with: MODEL or PROVIDER/MODEL; default: the same"
    )
    price_in: float | None = option(
        None, "hosted price in dollars per million input tokens; default: from genai-prices"
    )
    price_out: float | None = option(None, "hosted price in dollars per million output tokens")
    price_cached: float | None = option(None, "hosted price in dollars per million cached input tokens")
    busy_hours: float = option(24.0, "hours per day with this traffic, if it is shorter than a day")
    users: float | None = option(None, "number of users, for the cost per user")
