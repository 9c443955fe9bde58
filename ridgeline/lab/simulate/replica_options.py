"""ReplicaOptions: flags of `ridgeline simulate` for an engine, or each replica of a fleet. Imports nothing
heavy."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.options import option


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The hardware and limits of one simulated engine. [models.serve] of a fleet's file takes precedence."""

    hardware: str = option(
        "h200", "accelerator of an engine, as `ridgeline plan --hardware`; cpu: this machine"
    )
    max_running: int | None = option(None, "sequences computed together; default: 256, on CPUs 64")
    step_tokens: int | None = option(None, "most tokens of one step; default: 8192, on CPUs 512")
    kv_tokens: int | None = option(None, "KV cache in tokens; default: what the memory holds")
    max_context: int | None = option(None, "longest sequence in tokens; default: the model's")
    cold_start_s: float = option(60.0, "seconds from the start of a fleet's replica to its first request")
    draft_rates: str = option(
        "",
        "simulate speculation: shares of rows in which the first guess is right, the first two, and so on, "
        "such as 0.73,0.52,0.35; default: none",
    )
    draft_ms: float = option(0.0, "time of drafting, of each step with guesses, in milliseconds")
