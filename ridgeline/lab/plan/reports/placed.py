"""place_plan(): the replicas of a plan over the capacity pools of a file, by the classes of `fleet place`.

The plan says how many replicas and GPUs; the file says where GPUs are, what they cost, and which rules hold.
Other models of the file are placed too: they use the same quotas. Called by `cli.lab.plan` for --pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.fleet.placement import PlacedModel, Placement, PoolsFile, place
from ridgeline.fleet.placement.why import explain, places_toml
from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH
from ridgeline.lab.plan.plan_types import Plan


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """file: with the plan's model in place of the file's own entry of that name."""

    plan: Plan
    file: PoolsFile
    model: str
    placement: Placement

    @property
    def usd_per_hour(self) -> float:
        """Of the plan's replicas alone, those that could be placed."""
        prices = {pool.name: pool.price for pool in self.file.pools}
        each = self.plan.candidate.gpus
        return sum(count * each * prices[pool] for pool, count in self.placement.of(self.model).items())

    @property
    def unplaced(self) -> int:
        return self.placement.unplaced.get(self.model, 0)


def place_plan(plan: Plan, file: PoolsFile) -> PlacedPlan:
    chip = plan.request.chip.name
    if chip == "cpu":
        raise BadInput("--pools has GPUs: give a chip with --hardware, such as h100")
    name = plan.request.name
    own = next((one for one in file.models if one.name in (name, plan.request.model)), PlacedModel(name))
    if own.gpu and chip not in own.gpu:
        raise BadInput(f"--pools: [[models]] {own.name} allows {', '.join(own.gpu)}; the plan is for {chip}")
    placed = replace(own, replicas=plan.replicas, gpus=plan.candidate.gpus, gpu=(chip,))
    others = tuple(one for one in file.models if one.name != own.name)
    whole = replace(file, models=(placed, *others))
    return PlacedPlan(plan, whole, own.name, place(whole))


def placed_lines(found: PlacedPlan) -> Iterator[str]:
    """For the terminal, below the plan."""
    plan, listed = found.plan, found.plan.usd_per_hour
    yield "Where the replicas run (--pools: price, latency to users, residency, redundancy)"
    for line in explain(found.file, found.placement):
        yield f"  {line}"
    month = f"${found.usd_per_hour * HOURS_PER_MONTH:,.0f} a month"
    against = "" if listed is None else f"; at the list price of {plan.request.chip.name} ${listed:,.2f}"
    yield f"  {found.model}: ${found.usd_per_hour:,.2f} per hour, {month}{against}"
    budget = plan.request.budget
    if budget is not None and budget.per == "month" and found.usd_per_hour * HOURS_PER_MONTH > budget.usd:
        yield f"  over the budget of ${budget.usd:,.0f} a month"
    if places := places_toml(found.file, found.placement, found.model):
        yield "  for fleet.toml:"
        for line in places:
            yield f"    {line}"


def placed_facts(found: PlacedPlan) -> dict[str, Any]:
    return {
        "model": found.model,
        "replicas": found.placement.of(found.model),
        "unplaced": found.unplaced,
        "missing_redundancy": found.placement.missing.get(found.model, 0),
        "usd_per_hour": found.usd_per_hour,
        "why": explain(found.file, found.placement),
        "proven": found.placement.proven,
    }
