"""PlanOptions: the options of a plan besides model and traffic, declared once for flags and docs.

A separate module, so that the flag parser imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.options import option

DEFAULT_SLO = "ttft_p90=2s,tpot_p90=100ms"  # a quick first token, then faster than reading speed
GPUS_MAX = 64


@dataclass(frozen=True, slots=True)
class PlanOptions:
    hardware: str = option(
        "cpu",
        "plan for a chip (docs/hardware.md), for several (h100,h200), or for cpu: this machine, measured",
    )
    gpus_max: int | None = option(None, f"use at most this many chips; default: {GPUS_MAX}, with cpu 1")
    slo: str | None = option(None, f"keep these limits: ttft_p90=400ms,tpot_p90=50ms; default: {DEFAULT_SLO}")
    budget: str | None = option(None, "pay at most $5000/month, $0.40/Mtok or $0.01/request")
    engine: Literal["auto", "ridgeline", "vllm", "sglang", "trtllm"] = option(
        "auto", "serve with this engine; auto: ridgeline where it supports the model, else vllm"
    )
    precision: str | None = option(None, "keep weights as bfloat16, fp8, int8, int4 …; default: as stored")
    quality: Path | None = option(
        None,
        "use the verdict in this gate.json or results folder of `evaluate gate` besides those recorded here",
    )
    ungated: bool = option(
        False,
        "also choose weight formats that no quality gate has passed; default: only as stored, those with a "
        "passed gate, and --precision; a failed gate excludes a format in any case",
    )
    kv_precision: str = option("bfloat16", "keep keys and values in this type")
    set: tuple[str, ...] = option((), "plan with a setting of the engine, KEY=VALUE; may be repeated")
    gpu_price: float | None = option(None, "dollars per chip and hour; default: from the hardware table")
    hosted: str | None = option(
        None, "compare with a hosted model, MODEL or PROVIDER/MODEL; default: the same model"
    )
    price_in: float | None = option(
        None, "the hosted model's dollars per million input tokens; default: from genai-prices"
    )
    price_out: float | None = option(None, "the hosted model's dollars per million output tokens")
    price_cached: float | None = option(None, "the hosted model's dollars per million cached input tokens")
    pools: Path | None = option(
        None, "place the replicas over the capacity pools of this file (docs: fleet-pools), and print why"
    )
    busy_hours: float = option(24.0, "hours per day with this traffic")
    users: float | None = option(None, "divide the bill among this many users")
