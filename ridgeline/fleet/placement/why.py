"""explain(): the reason for the number of each model's replicas in each pool, as text."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.fleet.placement.pack import Placement, missing_redundancy, usable, weighed
from ridgeline.fleet.placement.pools import PlacedModel, Pool, PoolsFile


def explain(
    file: PoolsFile, placement: Placement, current: Mapping[str, Mapping[str, int]] | None = None
) -> list[str]:
    """A line for each model and pool: chosen pools first, then the reason against each other pool."""
    pools = {pool.name: pool for pool in file.pools}
    free = {pool.name: pool.quota for pool in file.pools}
    gpus = {model.name: model.gpus for model in file.models}
    for name, of in placement.replicas.items():
        for used, count in of.items():
            free[used] -= count * gpus[name]
    lines = []
    for model in file.models:
        counts = placement.of(model.name)
        placed = sum(counts.values())
        lines.append(f"{model.name}: {placed} of {model.replicas} replicas placed")
        options = [pool for pool in file.pools if not usable(file, model, pool)]
        options.sort(key=lambda pool: (weighed(file, model, pool), pool.name))
        for pool in sorted(file.pools, key=lambda pool: -counts.get(pool.name, 0)):
            count = counts.get(pool.name, 0)
            had = (current or {}).get(model.name, {}).get(pool.name, 0)
            reason = usable(file, model, pool)
            if count:
                why = _chosen(file, model, pool, options, free, pools, counts, had)
                lines.append(f"  {count} in {pool.name} ({pool.region}, {pool.kind}): {why}")
            elif reason:
                lines.append(f"  0 in {pool.name}: {reason}")
            else:
                lines.append(f"  0 in {pool.name}: {_unused(file, model, pool, counts, pools, free)}")
        if model.name in placement.unplaced:
            lines.append(f"  {placement.unplaced[model.name]} not placed: the allowed pools are full")
        if model.name in placement.missing:
            lines.append("  redundancy is incomplete: " + _lacking(model, counts, pools))
    if not placement.proven:
        lines.append("the search ended early: a cheaper placement may exist")
    return lines


def _chosen(
    file: PoolsFile,
    model: PlacedModel,
    pool: Pool,
    options: list[Pool],
    free: Mapping[str, int],
    pools: Mapping[str, Pool],
    counts: Mapping[str, int],
    had: int,
) -> str:
    price = f"${model.gpus * pool.price:.2f}/h each"
    if model.users:
        price += f" and {file.latency(model, pool.region):.0f} ms"
    if had:
        return f"{price}; {min(had, counts[pool.name])} stay where they are"
    if pool is options[0]:
        return f"{price}; the best allowed pool"
    without = {name: n for name, n in counts.items() if name != pool.name}
    cheaper = [one for one in options if weighed(file, model, one) < weighed(file, model, pool)]
    if missing_redundancy(model, without, pools) > missing_redundancy(model, counts, pools):
        return f"{price}; needed for redundancy"
    if any(one.kind == "spot" and free[one.name] >= model.gpus for one in cheaper):
        return f"{price}; no more than {model.max_spot_share:.0%} may run in spot pools"
    full = [one.name for one in cheaper if free[one.name] < model.gpus]
    if full:
        return f"{price}; better pools are full: {', '.join(full)}"
    return f"{price}; the best together with the other models and rules"


def _unused(
    file: PoolsFile,
    model: PlacedModel,
    pool: Pool,
    counts: Mapping[str, int],
    pools: Mapping[str, Pool],
    free: Mapping[str, int],
) -> str:
    if free[pool.name] < model.gpus:
        return "filled by other models"
    if any(weighed(file, model, pools[name]) > weighed(file, model, pool) for name in counts):
        return "not chosen: redundancy, spot share or replicas that stay"
    each = model.gpus * pool.price
    far = f", {file.latency(model, pool.region):.0f} ms" if model.users else ""
    return f"more expensive or farther away (${each:.2f}/h each{far})"


def _lacking(model: PlacedModel, counts: Mapping[str, int], pools: Mapping[str, Pool]) -> str:
    regions = {pools[name].region for name, count in counts.items() if count}
    spot = sum(count for name, count in counts.items() if pools[name].kind == "spot")
    return (
        f"{len(regions)} of {model.min_regions} regions, {len([1 for n in counts.values() if n])} of "
        f"{model.min_pools} pools, {spot} in spot pools"
    )


def places_toml(file: PoolsFile, placement: Placement, model: str) -> list[str]:
    """The placement of a model as [[models.places]] of fleet.toml."""
    regions = {pool.name: pool.region for pool in file.pools}
    lines: list[str] = []
    for pool, count in placement.of(model).items():
        lines += ["[[models.places]]", f'region = "{regions[pool]}"', f'pool = "{pool}"', f"weight = {count}"]
    return lines
