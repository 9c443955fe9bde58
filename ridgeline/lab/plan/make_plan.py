"""make_plan: from a request to a plan: how to serve it, what it will measure, what it costs, and why.

Called by `cli.lab.plan`. The search is analytic, the prediction is simulated on the user's traffic, costs are
hourly. `decision_list` explains the finished plan. Raises Infeasible with the nearest feasible alternative
rather than returning a bad plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ridgeline.lab.errors import BadInput, Infeasible
from ridgeline.lab.hardware.chip import Chip
from ridgeline.lab.perfmodel.operators import Phase
from ridgeline.lab.perfmodel.roofline import Roofline, study
from ridgeline.lab.plan import search
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH, BreakEven, Profile, break_even, hourly_profile
from ridgeline.lab.plan.choose_step_times import Times, times_of
from ridgeline.lab.plan.demand import Demand
from ridgeline.lab.plan.engines import ridgeline_refusal
from ridgeline.lab.plan.plan_types import Plan, PlanRequest
from ridgeline.lab.plan.quantization.choose import (
    FormatOption,
    MeasuredSpeeds,
    choose_format,
    format_figures,
    format_options,
    held_back,
    refuse_failed,
)
from ridgeline.lab.plan.quantization.figures import FormatFigures
from ridgeline.lab.plan.quantization.quality import format_quality
from ridgeline.lab.plan.refusals import check_budget, check_gpus, refuse_latency
from ridgeline.lab.plan.residuals import Correction, corrections, read_residuals
from ridgeline.lab.plan.search import Candidate, RejectedCandidate
from ridgeline.lab.plan.settings import EngineSettings, engine_settings
from ridgeline.lab.plan.sharing import sharing
from ridgeline.lab.plan.simulated_estimate import ROUGHLY, Estimate, capacity, estimate, verdict
from ridgeline.lab.prediction import Interval
from ridgeline.lab.traffic.request import Traffic

Report = Callable[[str], None]
OPEN_RATE = 0.9  # of the capacity, if no rate was given
TRIES, FEWER = 4, 0.9  # factor on each replica's load, if the whole traffic misses a limit
PROVIDER_CACHE_S = 300.0  # how long hosted APIs keep an unused prefix; five minutes is usual


def make_plan(request: PlanRequest, report: Report = lambda text: None) -> Plan:
    _check_lengths(request)
    if request.budget is not None and request.usd_per_gpu_hour is None:
        raise BadInput(f"a budget needs the hourly price of {request.chip.name}: give --gpu-price")
    report("trying weight formats and splits")
    speeds = MeasuredSpeeds(request)
    tried = _candidates(request, speeds)
    demand, chip, engine = request.demand, request.chip, tried.engine
    candidate = search.cheapest(tried.found, demand.rate, request.gpus_max)
    if candidate is None:
        raise _refuse(request, tried)
    settings = engine_settings(request.model, candidate, demand, given=request.settings)
    times = times_of(request.name, candidate, demand, settings.config)
    report("searching one replica's capacity")
    served, at = speeds.capacity(candidate, settings, times)
    if not served:
        raise refuse_latency(request, candidate, at)
    sized = _sized(request, candidate, settings, times, served, report)
    replicas, rate, served, share = sized.replicas, sized.rate, sized.served, sized.share
    usd_per_hour = None
    if request.usd_per_gpu_hour is not None:
        usd_per_hour = request.usd_per_gpu_hour * replicas * candidate.gpus
    report("counting")
    formats = format_figures(request, engine, candidate, served, rate, speeds)
    operating = max(1, round(sized.estimate.concurrency))
    return Plan(
        request=request,
        candidate=candidate,
        engine=engine,
        engine_refusal=tried.refusal,
        settings=settings,
        times=times,
        replicas=replicas,
        capacity=served,
        share=share,
        estimate=sized.estimate,
        metrics=sized.metrics,
        corrected=sized.corrected,
        prefill=_study(candidate, chip, "prefill", 1, demand, settings),
        decode=_study(candidate, chip, "decode", operating, demand, settings),
        formats=formats,
        chosen_format=_chosen_format(request, engine, candidate, formats, sized, times),
        ideal=sharing(_profiled(request, share)),
        kept=sharing(share.traffic, cache_tokens=_cache_tokens(settings, sized.estimate)),
        even=_even(request, candidate, served, share),
        usd_per_hour=usd_per_hour,
        usd_per_mtok=_usd_per_mtok(request, candidate, settings, times, sized, report),
    )


# ── candidates ───────────────────────────────────────────────────────────────────────────────────────────


def _check_lengths(request: PlanRequest) -> None:
    longest, most = request.demand.longest, request.shape.max_context
    if longest > most:
        raise BadInput(
            f"{request.shape.name} reads at most {most:,} tokens, and the longest request has {longest:,}: "
            f"--max-context {most} cuts prompts to it"
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """The engine, why it is not ridgeline, the chosen format's deployments, and what was not chosen."""

    engine: str
    refusal: str
    found: list[Candidate]
    refused: list[RejectedCandidate]
    options: list[FormatOption]  # of every engine that was tried


def _candidates(request: PlanRequest, speeds: MeasuredSpeeds) -> _Found:
    """ridgeline if it can, else vLLM's times; or the requested engine."""
    refusal = ridgeline_refusal(request.model, request.chip, request.precision, request.kv_precision)
    if request.engine not in ("auto", "ridgeline"):
        return _tried(request, request.engine, "another engine was requested", speeds)
    if refusal and (request.engine == "ridgeline" or request.chip.name == "cpu"):
        raise Infeasible(f"ridgeline does not serve this: {refusal}")
    if refusal:
        return _tried(request, "vllm", refusal, speeds)
    own = _tried(request, "ridgeline", "", speeds)
    fits = search.cheapest(own.found, request.demand.rate, request.gpus_max)
    if fits or request.engine == "ridgeline" or request.chip.name == "cpu":
        return own
    refusal = f"on one GPU, {own.refused[0].why}" if own.refused else "one GPU a replica is not enough"
    other = _tried(request, "vllm", refusal, speeds)
    return replace(other, refused=[*own.refused, *other.refused], options=[*own.options, *other.options])


def _tried(request: PlanRequest, engine: str, refusal: str, speeds: MeasuredSpeeds) -> _Found:
    options = format_options(request, engine)
    refuse_failed(request, options)
    chosen = choose_format(request, options, speeds)
    allowed = [option for option in options if option.is_allowed]
    if chosen is None:  # for the refusal: the first that has any deployment
        chosen = next((option for option in allowed if option.found), None)
    refused = [one for option in allowed for one in option.refused]
    return _Found(engine, refusal, chosen.found if chosen else [], refused, options)


def _refuse(request: PlanRequest, tried: _Found) -> Infeasible:
    rate = request.demand.rate
    if tried.found and rate is not None:
        refusal = search.refuse_rate(tried.found, rate, request.gpus_max)
    elif tried.refused:
        refusal = search.refuse_all(tried.refused, request.slo, request.gpus_max)
    else:
        refusal = Infeasible("no weight format may be chosen")
    return Infeasible(f"{refusal}{held_back(request, tried.options)}")


def _chosen_format(
    request: PlanRequest,
    engine: str,
    candidate: Candidate,
    formats: tuple[FormatFigures, ...],
    sized: _Sized,
    times: Times,
) -> FormatFigures:
    """Its figures among the considered formats; a requested one may not be among them."""
    for figures in formats:
        if figures.precision == candidate.precision:
            return figures
    quality = format_quality(request, engine, candidate.deployment.kept)
    return FormatFigures(
        candidate.precision,
        sized.replicas * candidate.gpus,
        None,
        sized.served / candidate.gpus,
        speed="measured" if times.method == "simulated" else "predicted",
        quality=quality,
    )


# ── how many ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Sized:
    replicas: int
    rate: float  # arrivals per second of the whole service
    served: float  # that one replica serves within the service level
    share: Demand
    estimate: Estimate
    metrics: dict[str, Interval]
    corrected: dict[str, Correction]


def _sized(
    request: PlanRequest,
    candidate: Candidate,
    settings: EngineSettings,
    times: Times,
    served: float,
    report: Report,
) -> _Sized:
    """As many replicas as keep the limits on the whole traffic, corrected by earlier residuals.

    The capacity is searched on the beginning of the traffic; if all of it needs more, replicas are added.
    """
    factors = corrections(
        read_residuals(), hardware=request.hardware, model=request.name, method=times.method
    )
    first: _Sized | None = None
    for _ in range(TRIES):
        rate = OPEN_RATE * served if request.demand.rate is None else request.demand.rate
        replicas = max(1, math.ceil(rate / served - 1e-9))
        check_gpus(request, candidate, replicas, served)
        share = request.demand.share(rate / replicas)
        check_budget(request, candidate, replicas, served, _profile(request, share))
        report(f"simulating {replicas} replica{'s' * (replicas > 1)}")
        found = estimate(share, settings.limits, times, request.slo)
        known = {name: factors[name] for name in found.metrics if name in factors}
        metrics = {
            name: known[name].apply(interval) if name in known else interval
            for name, interval in found.metrics.items()
        }
        sized = _Sized(replicas, rate, served, share, found, metrics, known)
        if all(verdict(metrics.get(limit.key), limit) != "no" for limit in request.slo.limits):
            return sized
        first = first or sized
        served = FEWER * rate / replicas
    assert first is not None
    return first  # fewer requests do not help: the plan names the missed limit


# ── what it takes ────────────────────────────────────────────────────────────────────────────────────────


def _study(
    candidate: Candidate, chip: Chip, phase: Phase, batch: int, demand: Demand, settings: EngineSettings
) -> Roofline:
    prompt = max(1, min(settings.limits.prefill_chunk, round(demand.mean_input)))
    context = 0 if phase == "prefill" else round(demand.mean_input + demand.mean_output / 2)
    deployment = candidate.deployment
    return study(
        deployment.shape,
        chip,
        phase,
        batch,
        prompt,
        context,
        deployment.kept,
        deployment.kv_precision,
        deployment.tp,
    )


def _cache_tokens(settings: EngineSettings, found: Estimate) -> float:
    """KV memory left by live sequences at peak use."""
    return settings.limits.num_blocks * settings.limits.block_size * max(0.0, 1 - found.kv_peak)


def _even(request: PlanRequest, candidate: Candidate, served: float, share: Demand) -> BreakEven | None:
    if request.offers is None or request.usd_per_gpu_hour is None:
        return None
    traffic = _profiled(request, share)
    return break_even(
        _profile(request, share),
        request.offers.typical,
        cached_share=sharing(traffic, kept_s=PROVIDER_CACHE_S).share,
        replica_usd_per_hour=request.usd_per_gpu_hour * candidate.gpus,
        replica_requests_per_s=served * request.demand.requests_per_arrival,
    )


def _profiled(request: PlanRequest, share: Demand) -> Traffic:
    """The whole service's traffic; without a rate, that of the one replica."""
    return share.traffic if request.demand.rate is None else request.demand.traffic


def _profile(request: PlanRequest, share: Demand) -> Profile:
    return hourly_profile(_profiled(request, share), busy_hours=request.busy_hours)


def _usd_per_mtok(
    request: PlanRequest,
    candidate: Candidate,
    settings: EngineSettings,
    times: Times,
    sized: _Sized,
    report: Report,
) -> Interval | None:
    """Over the month, idle hours included; the ends come from the fastest and slowest step times. Without a
    rate each end uses one replica; infinite if none keeps the limits.
    """
    if request.usd_per_gpu_hour is None:
        return None
    month = _profile(request, sized.share).month()
    mtok = (month.input_tokens + month.output_tokens) / 1e6
    replica = request.usd_per_gpu_hour * candidate.gpus * HOURS_PER_MONTH / mtok

    def usd(factor: float) -> float:
        steps = replace(times, steps=times.steps.scaled(factor))
        served, _ = capacity(request.demand, settings.limits, steps, request.slo, ROUGHLY)
        if not served:
            return math.inf
        if request.demand.rate is None:
            return replica * sized.served / served
        return replica * math.ceil(sized.rate / served - 1e-9)

    mid = replica * sized.replicas
    report("pricing the ends of the interval")
    if request.demand.rate is None:
        return Interval(min(mid, usd(times.low)), mid, max(mid, usd(times.high)))
    fast = mid if sized.replicas == 1 else usd(times.low)
    verdicts = [verdict(sized.metrics.get(limit.key), limit) for limit in request.slo.limits]
    # Limits kept at the slow end need no extra replica; missed ones need at least one.
    slow = mid if all(found == "yes" for found in verdicts) else max(mid + replica, usd(times.high))
    return Interval(min(mid, fast), mid, slow)
