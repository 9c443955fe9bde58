"""Chooses the weight format of a plan: by cost, among formats whose quality is known to be good enough.

The stored format is the base. Another one takes its place where the base does not do, or where it costs a
tenth less. A format whose gate failed is never taken, one without a verdict only with --ungated or
--precision. Costs are compared like with like: both by measured step times, or both by the formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.lab.errors import Infeasible
from ridgeline.lab.hardware.chip import CPU
from ridgeline.lab.plan import search
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH
from ridgeline.lab.plan.choose_step_times import Times, times_of
from ridgeline.lab.plan.decision_gates import QUANTIZE_GAIN
from ridgeline.lab.plan.plan_types import PlanRequest
from ridgeline.lab.plan.quantization.figures import FormatFigures, FormatQuality, Speed
from ridgeline.lab.plan.quantization.formats import precisions_for
from ridgeline.lab.plan.quantization.quality import format_quality
from ridgeline.lab.plan.search import Candidate, RejectedCandidate
from ridgeline.lab.plan.settings import EngineSettings, engine_settings
from ridgeline.lab.plan.simulated_estimate import capacity
from ridgeline.models.spec.precision import Precision


@dataclass(frozen=True, slots=True)
class FormatOption:
    """One format on one engine: its deployments, and whether it may be chosen."""

    engine: str
    precision: Precision
    quality: FormatQuality
    is_allowed: bool
    found: list[Candidate]
    refused: list[RejectedCandidate]

    def best(self, request: PlanRequest) -> Candidate | None:
        return search.cheapest(self.found, request.demand.rate, request.gpus_max)


class MeasuredSpeeds:
    """Arrivals per second that one replica serves, simulated with step times fitted to exactly its format."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._known: dict[tuple[str, str, int], tuple[float, dict[str, float]]] = {}

    def of(self, candidate: Candidate) -> float | None:
        """None: this format was not fitted here, or no replica keeps the limits."""
        request = self._request
        settings = engine_settings(request.model, candidate, request.demand, given=request.settings)
        times = times_of(request.name, candidate, request.demand, settings.config)
        return self.capacity(candidate, settings, times)[0] or None if times.method == "simulated" else None

    def capacity(
        self, candidate: Candidate, settings: EngineSettings, times: Times
    ) -> tuple[float, dict[str, float]]:
        """Of `simulated_estimate`; a deployment is simulated once."""
        key = (candidate.deployment.backend, candidate.precision, candidate.gpus)
        if key not in self._known:
            request = self._request
            self._known[key] = capacity(request.demand, settings.limits, times, request.slo)
        return self._known[key]


def format_options(request: PlanRequest, engine: str) -> list[FormatOption]:
    """The stored format first; or the requested one alone."""
    options = []
    for place, precision in enumerate(precisions_for(request, engine)):
        quality = format_quality(request, engine, precision)
        asked = request.precision is not None or place == 0  # as stored: the user chose its KV type
        is_allowed = quality.status in ("as stored", "not quantized", "passed") or (
            quality.status == "not gated" and (asked or request.ungated)
        )
        found, refused = _deployments(request, engine, precision)
        options.append(FormatOption(engine, precision, quality, is_allowed, found, refused))
    return options


def choose_format(
    request: PlanRequest, options: Sequence[FormatOption], speeds: MeasuredSpeeds
) -> FormatOption | None:
    """None if no allowed format serves the request."""
    fitting = [(one, best) for one in options if one.is_allowed and (best := one.best(request)) is not None]
    if not fitting:
        return None
    base, base_best = fitting[0]
    if base is not options[0]:
        return base  # as stored does not do: the widest format that does
    cheapest, gain = base, QUANTIZE_GAIN
    for option, best in fitting[1:]:
        own, others = _costs(request, best, base_best, speeds)
        if 1 - own / others >= gain:
            cheapest, gain = option, 1 - own / others
    return cheapest


def _costs(
    request: PlanRequest, one: Candidate, other: Candidate, speeds: MeasuredSpeeds
) -> tuple[float, float]:
    """GPUs for the rate, or GPU seconds per request without a rate."""
    measured = [speeds.of(one), speeds.of(other)]
    rate = request.demand.rate

    def cost(candidate: Candidate, served: float | None) -> float:
        if rate is None:
            return candidate.gpus / (served or candidate.requests_per_s)
        if served is None:
            return float(candidate.replicas(rate) * candidate.gpus)
        return float(max(1, math.ceil(rate / served - 1e-9)) * candidate.gpus)

    if None in measured:
        return cost(one, None), cost(other, None)
    return cost(one, measured[0]), cost(other, measured[1])


def refuse_failed(request: PlanRequest, options: Sequence[FormatOption]) -> None:
    """A format that the user asked for by name, and whose gate failed."""
    failed = [one for one in options if one.quality.status == "failed"]
    if request.precision is not None and failed:
        quality = failed[0].quality
        assert quality.verdict is not None
        raise Infeasible(
            f"--precision {request.precision}: the quality gate {quality.verdict.words}. Plan another "
            f"precision, or gate it again with the loss that you accept: {quality.command}"
        )


def held_back(request: PlanRequest, options: Sequence[FormatOption]) -> str:
    """What would serve the request and may not, for the end of a refusal; "" if there is nothing."""
    for option in options:
        if option.is_allowed or option.best(request) is None:
            continue
        where = f"{option.precision} ({option.engine})"
        if option.quality.verdict is not None:
            return f". {where} would do, but its quality gate {option.quality.verdict.words}"
        return (
            f". {where} would do, but no quality gate has passed it: --ungated plans with it, "
            f"`{option.quality.command}` gates it"
        )
    return ""


def format_figures(
    request: PlanRequest,
    engine: str,
    candidate: Candidate,
    served: float,
    rate: float,
    speeds: MeasuredSpeeds,
) -> tuple[FormatFigures, ...]:
    """Every format, as stored first. Formats without measured step times are computed by the formula, scaled
    to the simulation of the chosen one.
    """
    scale = served / candidate.requests_per_s
    asked = replace(request, precision=None)
    options = format_options(asked, engine)
    if engine == "ridgeline" and request.chip.name != CPU:  # formats that another engine would serve there
        own = {str(option.precision) for option in options}
        options += [one for one in format_options(asked, "vllm")[1:] if str(one.precision) not in own]
    figures = []
    for option in options:
        name = str(option.precision) if option.engine == engine else f"{option.precision} ({option.engine})"
        if not option.found:
            why = option.refused[0].why if option.refused else ""
            figures.append(FormatFigures(name, None, None, None, why, quality=option.quality))
            continue
        gpus, per_gpu, speed = _fewest(option, rate, scale, speeds)
        price = request.usd_per_gpu_hour
        usd = None if price is None else gpus * price * HOURS_PER_MONTH
        figures.append(FormatFigures(name, gpus, usd, per_gpu, speed=speed, quality=option.quality))
    return tuple(figures)


def _fewest(
    option: FormatOption, rate: float, scale: float, speeds: MeasuredSpeeds
) -> tuple[int, float, Speed]:
    """GPUs for the rate, requests per second of one GPU, and how they are known."""
    counted: list[tuple[int, float, float, Speed]] = []
    for candidate in option.found:
        measured = speeds.of(candidate)
        each = measured or candidate.requests_per_s * scale
        gpus = math.ceil(rate / each - 1e-9) * candidate.gpus
        speed: Speed = "predicted" if measured is None else "measured"
        counted.append((gpus, candidate.tpot.mid, each / candidate.gpus, speed))
    gpus, _, per_gpu, speed = min(counted)
    return gpus, per_gpu, speed


def _deployments(
    request: PlanRequest, engine: str, precision: Precision
) -> tuple[list[Candidate], list[RejectedCandidate]]:
    return search.candidates(
        request.shape,
        request.chip,
        request.demand,
        request.slo,
        backend=engine,
        precisions=[precision],
        kv_precision=request.kv_precision,
        gpus_max=request.gpus_max,
        max_batch=request.settings.get("max_running") or search.MAX_BATCH,
    )
