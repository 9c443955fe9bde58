"""Plans one request for several chips, and finds the Pareto front.

Called by `cli.lab.plan` if --hardware names more than one. A chip is on the Pareto front if no other is at
least as good in cost, time to first token and time per token, and better in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.lab.charts import grouped, number
from ridgeline.lab.errors import Infeasible
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH
from ridgeline.lab.plan.make_plan import make_plan
from ridgeline.lab.plan.plan_types import Plan, PlanRequest
from ridgeline.lab.plan.reports.text import columns

HEAD = (
    "chip",
    "chips",
    "engine",
    "weights",
    "one replica",
    "$ a month",
    "$/Mtok",
    "TTFT P90",
    "TPOT P90",
    "",
)
LATENCIES = ("ttft_ms.p90", "tpot_ms.p90")


@dataclass(frozen=True, slots=True)
class ChipPlan:
    """plan: None if the chip cannot serve the request; `refused` is the reason."""

    chip: str
    plan: Plan | None
    refused: str = ""

    @property
    def usd_month(self) -> float | None:
        if self.plan is None or self.plan.usd_per_hour is None:
            return None
        return self.plan.usd_per_hour * HOURS_PER_MONTH

    @property
    def merits(self) -> tuple[float, ...] | None:
        """The compared values, less is better; None: no plan, or no price."""
        if self.plan is None or self.usd_month is None:
            return None
        latencies = [self.plan.metrics[key].mid for key in LATENCIES if key in self.plan.metrics]
        return (self.usd_month, *latencies)


def plan_chips(requests: Sequence[PlanRequest], report: Callable[[str], None]) -> list[ChipPlan]:
    """One plan per chip, in order. Infeasible if no chip can serve the request."""
    answers = []
    for request in requests:
        name = request.chip.name
        try:
            plan = make_plan(request, lambda text, chip=name: report(f"{chip}: {text}"))  # type: ignore[misc]
        except Infeasible as error:
            answers.append(ChipPlan(name, None, str(error)))
        else:
            answers.append(ChipPlan(name, plan))
    if all(answer.plan is None for answer in answers):
        raise Infeasible("; ".join(f"{answer.chip}: {answer.refused}" for answer in answers))
    return answers


def pareto(answers: Sequence[ChipPlan]) -> set[str]:
    """The chips that no other beats; chips without a price are not compared."""
    compared = {answer.chip: answer.merits for answer in answers if answer.merits is not None}
    return {
        chip
        for chip, own in compared.items()
        if not any(_beats(other, own) for name, other in compared.items() if name != chip)
    }


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def comparison_lines(answers: Sequence[ChipPlan]) -> Iterator[str]:
    front = pareto(answers)
    rows = [[*HEAD]]
    for answer in sorted(answers, key=lambda one: one.merits or (float("inf"),)):
        plan = answer.plan
        if plan is None:
            continue
        month, each = answer.usd_month, plan.usd_per_mtok
        rows.append(
            [
                answer.chip,
                f"{plan.gpus} in {plan.replicas}",
                plan.engine,
                _weights(plan),
                f"{number(plan.capacity)}/s",
                "no price" if month is None else f"{month:,.0f}",
                "–" if each is None else f"{each.mid:.3g}",
                *(_ms(plan, key) for key in LATENCIES),
                "Pareto" if answer.chip in front else "",
            ]
        )
    yield from columns(rows, left=(0, 2, 3, 9))
    yield "Pareto: no other chip is at least as good in cost, TTFT and TPOT, and better in one of them."
    for answer in answers:
        if answer.plan is None:
            yield f"{answer.chip}: cannot. {answer.refused}"


def comparison_facts(answers: Sequence[ChipPlan]) -> list[dict[str, Any]]:
    """For JSON."""
    front = pareto(answers)
    return [
        {
            "chip": answer.chip,
            "refused": answer.refused or None,
            "gpus": answer.plan.gpus if answer.plan else None,
            "replicas": answer.plan.replicas if answer.plan else None,
            "weights": answer.plan.candidate.precision if answer.plan else None,
            "quality": answer.plan.chosen_format.quality.facts() if answer.plan else None,
            "usd_month": answer.usd_month,
            "metrics": {key: value.mid for key, value in answer.plan.metrics.items()} if answer.plan else {},
            "pareto": answer.chip in front,
        }
        for answer in answers
    ]


def _weights(plan: Plan) -> str:
    status = plan.chosen_format.quality.status
    unremarkable = status in ("as stored", "not quantized")
    return plan.candidate.precision if unremarkable else f"{plan.candidate.precision} ({status})"


def _ms(plan: Plan, key: str) -> str:
    return f"{grouped(plan.metrics[key].mid)} ms" if key in plan.metrics else "–"
