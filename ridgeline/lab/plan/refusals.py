"""Infeasible plans: errors name the binding constraint, its figures, and the nearest feasible alternative.

Raised by `make_plan` after a deployment was found and simulated; `search` raises if there is none.
"""

from __future__ import annotations

import math

from ridgeline.lab.charts import grouped
from ridgeline.lab.errors import Infeasible
from ridgeline.lab.hardware.chip import CPU
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH, Profile
from ridgeline.lab.plan.plan_types import PlanRequest
from ridgeline.lab.plan.search import Candidate


def refuse_latency(request: PlanRequest, candidate: Candidate, at: dict[str, float]) -> Infeasible:
    """at: the limits' metrics with minimal traffic."""
    worst = max(request.slo.limits, key=lambda limit: at[limit.key] / limit.ms)
    reached = at[worst.key]
    if math.isinf(reached):
        return _refuse_longest(request, candidate)
    return Infeasible(
        f"{worst} cannot be met on {request.chip.name} with tp={candidate.deployment.tp}, even with minimal "
        f"traffic: its requests reach {grouped(reached)} ms without queueing. Nearest: "
        f"{worst.metric}_p{worst.percentile}={math.ceil(reached):.0f}ms, shorter prompts, or faster hardware"
    )


def _refuse_longest(request: PlanRequest, candidate: Candidate) -> Infeasible:
    """Requests are refused with an empty queue: they do not fit even an empty cache."""
    room = max(0, candidate.memory.kv_room) // max(1, candidate.memory.kv_per_token)
    return Infeasible(
        f"the longest request has {request.demand.longest:,} tokens, and the cache of one replica "
        f"({request.chip.name}, {candidate.precision}, tp={candidate.deployment.tp}) has room for about "
        f"{room:,}: such requests would be refused. Nearest: --max-context {room} cuts prompts to it, a "
        "smaller --kv-precision, or hardware with more memory"
    )


def check_gpus(request: PlanRequest, candidate: Candidate, replicas: int, served: float) -> None:
    needed = replicas * candidate.gpus
    if needed <= request.gpus_max:
        return
    most = request.gpus_max // candidate.gpus
    if request.chip.name == CPU:
        raise Infeasible(
            f"{request.demand.rate:g} arrivals/s are more than this machine serves within {request.slo}: "
            f"{served:.3g}/s. Nearest: --rate {_below(served)}, shorter answers, or a wider limit"
        )
    raise Infeasible(
        f"{request.demand.rate:g} arrivals/s need {needed} {request.chip.name} in {replicas} replicas, and "
        f"--gpus-max is {request.gpus_max}: one replica serves {served:.3g}/s within {request.slo}. "
        f"Nearest: --rate {_below(most * served)}, or --gpus-max {needed}"
    )


def check_budget(
    request: PlanRequest, candidate: Candidate, replicas: int, served: float, profile: Profile
) -> None:
    if request.budget is None or request.usd_per_gpu_hour is None:
        return
    month = profile.month()
    allowed = request.budget.usd_month(month.input_tokens + month.output_tokens, month.requests)
    each = request.usd_per_gpu_hour * candidate.gpus * HOURS_PER_MONTH
    needed = replicas * each
    if needed <= allowed:
        return
    afforded = int(allowed // each)
    nearest = f"--rate {_below(afforded * served)} for that money, or " if afforded else ""
    per = {"month": "month", "mtok": "Mtok", "request": "request"}[request.budget.per]
    enough = request.budget.usd * needed / allowed
    enough = math.ceil(enough) if enough > 100 else math.ceil(enough * 1e6) / 1e6
    raise Infeasible(
        f"{replicas * candidate.gpus} {request.chip.name} cost ${needed:,.0f} a month, and the budget "
        f"({request.budget}) allows ${allowed:,.0f}: within {request.slo} one replica of ${each:,.0f} "
        f"serves {served:.3g} arrivals/s. Nearest: {nearest}--budget '${enough:.10g}/{per}'"
    )


def _below(rate: float) -> str:
    """A rate to propose: slightly below the simulated one, so that it is feasible."""
    return f"{0.95 * rate:.3g}"
