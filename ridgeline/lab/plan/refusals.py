"""Plans that cannot be: refusals name the constraint that binds, its figures, and the nearest that would do.

Raised by `make`, once a way to serve was found and simulated; what no way does at all, `search` refuses.
"""

from __future__ import annotations

import math

from ridgeline.lab.charts import grouped
from ridgeline.lab.errors import Infeasible
from ridgeline.lab.hardware import CPU
from ridgeline.lab.plan.answer import Question
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH, Profile
from ridgeline.lab.plan.search import Way


def refuse_latency(question: Question, way: Way, at: dict[str, float]) -> Infeasible:
    """at: what the limits' metrics are with hardly any traffic."""
    worst = max(question.slo.limits, key=lambda limit: at[limit.key] / limit.ms)
    reached = at[worst.key]
    if math.isinf(reached):
        return _refuse_longest(question, way)
    return Infeasible(
        f"{worst} cannot be met on {question.chip.name} with tp={way.deployment.tp}, however few requests "
        f"come: those of this traffic reach {grouped(reached)} ms with nobody waiting. Nearest: "
        f"{worst.metric}_p{worst.percentile}={math.ceil(reached):.0f}ms, shorter prompts, or faster hardware"
    )


def _refuse_longest(question: Question, way: Way) -> Infeasible:
    """Requests are refused though nobody waits: they find no room, however empty the cache is."""
    room = max(0, way.memory.kv_room) // max(1, way.memory.kv_per_token)
    return Infeasible(
        f"the longest request has {question.demand.longest:,} tokens, and the cache of one replica "
        f"({question.chip.name}, {way.precision}, tp={way.deployment.tp}) has room for about {room:,}: such "
        f"requests would be refused. Nearest: --max-context {room} cuts prompts to it, a smaller "
        "--kv-precision, or hardware with more memory"
    )


def check_gpus(question: Question, way: Way, replicas: int, served: float) -> None:
    needed = replicas * way.gpus
    if needed <= question.gpus_max:
        return
    most = question.gpus_max // way.gpus
    if question.chip.name == CPU:
        raise Infeasible(
            f"{question.demand.rate:g} arrivals/s are more than this machine serves within {question.slo}: "
            f"{served:.3g}/s. Nearest: --rate {_below(served)}, shorter answers, or a wider limit"
        )
    raise Infeasible(
        f"{question.demand.rate:g} arrivals/s need {needed} {question.chip.name} in {replicas} replicas, and "
        f"--gpus-max is {question.gpus_max}: one replica serves {served:.3g}/s within {question.slo}. "
        f"Nearest: --rate {_below(most * served)}, or --gpus-max {needed}"
    )


def check_budget(question: Question, way: Way, replicas: int, served: float, profile: Profile) -> None:
    if question.budget is None or question.usd_per_gpu_hour is None:
        return
    month = profile.month()
    allowed = question.budget.usd_month(month.input_tokens + month.output_tokens, month.requests)
    each = question.usd_per_gpu_hour * way.gpus * HOURS_PER_MONTH
    needed = replicas * each
    if needed <= allowed:
        return
    afforded = int(allowed // each)
    nearest = f"--rate {_below(afforded * served)} for that money, or " if afforded else ""
    per = {"month": "month", "mtok": "Mtok", "request": "request"}[question.budget.per]
    enough = question.budget.usd * needed / allowed
    enough = math.ceil(enough) if enough > 100 else math.ceil(enough * 1e6) / 1e6
    raise Infeasible(
        f"{replicas * way.gpus} {question.chip.name} cost ${needed:,.0f} a month, and the budget "
        f"({question.budget}) allows ${allowed:,.0f}: within {question.slo} one replica of ${each:,.0f} "
        f"serves {served:.3g} arrivals/s. Nearest: {nearest}--budget '${enough:.10g}/{per}'"
    )


def _below(rate: float) -> str:
    """A rate to propose: a little less than what was found by simulation, so that it does."""
    return f"{0.95 * rate:.3g}"
