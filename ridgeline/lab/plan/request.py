"""read_request: from the options of a plan to a PlanRequest, with the model, the chip and the prices found.

Called by `cli.lab.plan`, once for each chip. BadInput names the flag whose value is wrong.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from ridgeline.engine.config import EngineConfig
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.evaluate.verdicts import read_verdicts
from ridgeline.lab.hardware.chip import CPU, Chip
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.model_identity import identify
from ridgeline.lab.plan.demand import Demand, parse_budget, read_demand, read_slo
from ridgeline.lab.plan.options import GPUS_MAX, PlanOptions
from ridgeline.lab.plan.plan_types import PlanRequest
from ridgeline.lab.plan.prices import Offers, given_offer, hosted_offers
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.models.spec.find_spec import find_spec, published_for
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import format_name
from ridgeline.models.spec.published import published_id
from ridgeline.options import check_values


def chip_names(options: PlanOptions) -> list[str]:
    """The chips of --hardware, in order."""
    names = [name.strip() for name in options.hardware.split(",") if name.strip()]
    if len(names) > 1 and options.gpu_price is not None:
        raise BadInput("--gpu-price applies to one chip; with several, prices come from the hardware table")
    return names


def read_request(
    model: str, options: PlanOptions, traffic: TrafficOptions, hardware_name: str | None = None
) -> PlanRequest:
    """hardware_name: one of several chips."""
    slo = read_slo(options.slo)
    budget = None if options.budget is None else parse_budget(options.budget)
    demand = read_demand(traffic)
    shape = find_spec(model)
    known = published_for(model)
    chip = find_chip(hardware_name or options.hardware)  # after all checks: a processor may be measured
    try:
        kv_precision = format_name(options.kv_precision)
        precision = None if options.precision is None else format_name(options.precision)
    except ValueError as error:
        raise BadInput(f"--precision, --kv-precision: {error}") from error
    offers, why_none = offers_of(options, shape, demand)
    named = f"hf:{published_id(known, model)}" if known else model
    return PlanRequest(
        model=named,
        shape=shape,
        chip=chip,
        demand=demand,
        slo=slo,
        gpus_max=gpus_max(options.gpus_max, chip),
        engine=options.engine,
        precision=precision,
        kv_precision=kv_precision,
        budget=budget,
        usd_per_gpu_hour=positive("--gpu-price", options.gpu_price) or chip.usd_per_hour,
        offers=offers,
        no_offers=why_none,
        busy_hours=options.busy_hours,
        users=positive("--users", options.users),
        settings=engine_values(options.set),
        identity=identify(named),
        verdicts=tuple(read_verdicts(options.quality)),
        ungated=options.ungated,
    )


def offers_of(options: PlanOptions, shape: ModelSpec, demand: Demand) -> tuple[Offers | None, str]:
    """Prices as given, else as listed; or the reason why there are none."""
    given = [
        positive("--" + name.replace("_", "-"), getattr(options, name))
        for name in ("price_in", "price_out", "price_cached")
    ]
    if given[0] is not None and given[1] is not None:
        return given_offer(given[0], given[1], given[2]), ""
    if any(price is not None for price in given):
        raise BadInput("--price-in and --price-out go together, with --price-cached where there is one")
    ratio = demand.mean_input / demand.mean_output
    try:
        return hosted_offers(shape.name, shape.parameters, wanted=options.hosted, in_to_out=ratio), ""
    except BadInput:
        raise
    except LabError as error:  # the table is not installed: a plan does not need it
        return None, str(error)


def gpus_max(asked: int | None, chip: Chip) -> int:
    if asked is not None and asked < 1:
        raise BadInput(f"--gpus-max must be at least 1, got {asked}")
    if chip.name == CPU:
        return 1
    return asked or GPUS_MAX


def positive(flag: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise BadInput(f"{flag} must be above 0, got {value:g}")
    return value


def engine_values(pairs: Sequence[str]) -> dict[str, Any]:
    """`--set KEY=V`, each value as in a config file."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise BadInput(f"--set {pair}: write KEY=VALUE")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text  # a word without quotes
    return check_values(EngineConfig, values, where="--set ")
