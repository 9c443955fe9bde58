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
from ridgeline.lab.plan.decision_gates import PrecisionFigures
from ridgeline.lab.plan.demand import Demand
from ridgeline.lab.plan.engines import ridgeline_refusal
from ridgeline.lab.plan.plan_types import Plan, PlanRequest
from ridgeline.lab.plan.refusals import check_budget, check_gpus, refuse_latency
from ridgeline.lab.plan.residuals import Correction, corrections, read_residuals
from ridgeline.lab.plan.search import Candidate, RejectedCandidate
from ridgeline.lab.plan.settings import EngineSettings, engine_settings
from ridgeline.lab.plan.sharing import sharing
from ridgeline.lab.plan.simulated_estimate import ROUGHLY, Estimate, capacity, estimate, verdict
from ridgeline.lab.plan.times import Times, times_of
from ridgeline.lab.prediction import Interval
from ridgeline.lab.traffic.request import Traffic
from ridgeline.models.spec.precision import Precision

Report = Callable[[str], None]
OPEN_RATE = 0.9  # of the capacity, if no rate was given
TRIES, FEWER = 4, 0.9  # factor on each replica's load, if the whole traffic misses a limit
PROVIDER_CACHE_S = 300.0  # how long hosted APIs keep an unused prefix; five minutes is usual


def make_plan(request: PlanRequest, report: Report = lambda text: None) -> Plan:
    _check_lengths(request)
    if request.budget is not None and request.usd_per_gpu_hour is None:
        raise BadInput(f"a budget needs the hourly price of {request.chip.name}: give --gpu-price")
    report("trying precisions and splits")
    engine, refusal, found, refused = _candidates(request)
    demand, slo, chip = request.demand, request.slo, request.chip
    candidate = search.cheapest(found, demand.rate, request.gpus_max)
    if candidate is None:
        if found and demand.rate is not None:
            raise search.refuse_rate(found, demand.rate, request.gpus_max)
        raise search.refuse_all(refused, slo, request.gpus_max)
    settings = engine_settings(request.model, candidate, demand, given=request.settings)
    times = times_of(request.name, candidate, demand, settings.config)
    report("searching one replica's capacity")
    served, at = capacity(demand, settings.limits, times, slo)
    if not served:
        raise refuse_latency(request, candidate, at)
    sized = _sized(request, candidate, settings, times, served, report)
    replicas, rate, served, share = sized.replicas, sized.rate, sized.served, sized.share
    usd_per_hour = None
    if request.usd_per_gpu_hour is not None:
        usd_per_hour = request.usd_per_gpu_hour * replicas * candidate.gpus
    report("counting")
    operating = max(1, round(sized.estimate.concurrency))
    return Plan(
        request=request,
        candidate=candidate,
        engine=engine,
        engine_refusal=refusal,
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
        precisions=_precisions(request, engine, candidate, served, rate),
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


def _candidates(request: PlanRequest) -> tuple[str, str, list[Candidate], list[RejectedCandidate]]:
    """ridgeline if it can, else vLLM's times; or the requested engine."""
    refusal = ridgeline_refusal(request.model, request.chip, request.precision, request.kv_precision)
    if request.engine not in ("auto", "ridgeline"):
        found, refused = _tried(request, request.engine)
        return request.engine, "another engine was requested", found, refused
    if refusal and (request.engine == "ridgeline" or request.chip.name == "cpu"):
        raise Infeasible(f"ridgeline does not serve this: {refusal}")
    refused = []
    if not refusal:
        found, refused = _tried(request, "ridgeline")
        fits = search.cheapest(found, request.demand.rate, request.gpus_max)
        if fits or request.engine == "ridgeline" or request.chip.name == "cpu":
            return "ridgeline", "", found, refused
        refusal = f"on one GPU, {refused[0].why}" if refused else "one GPU a replica is not enough"
    found, more = _tried(request, "vllm")
    return "vllm", refusal, found, [*refused, *more]


def _tried(request: PlanRequest, backend: str) -> tuple[list[Candidate], list[RejectedCandidate]]:
    """As stored, or as requested; smaller formats only if that is not enough."""
    first: list[Candidate] | None = None
    every: list[RejectedCandidate] = []
    for precision in precisions_for(request, backend):
        found, refused = _candidates_with(request, backend, precision)
        every += refused
        if search.cheapest(found, request.demand.rate, request.gpus_max) is not None:
            return found, every
        first = found if first is None else first
    return first or [], every


def _candidates_with(
    request: PlanRequest, backend: str, precision: Precision
) -> tuple[list[Candidate], list[RejectedCandidate]]:
    return search.candidates(
        request.shape,
        request.chip,
        request.demand,
        request.slo,
        backend=backend,
        precisions=[precision],
        kv_precision=request.kv_precision,
        gpus_max=request.gpus_max,
    )


def precisions_for(request: PlanRequest, backend: str) -> list[Precision]:
    """The first precision to plan with, then smaller ones that chip and engine support."""
    shape, chip = request.shape, request.chip
    if request.precision is not None:
        return [Precision.named(request.precision)]
    on_gpu = chip.name != "cpu"
    stored = Precision.named("bfloat16") if backend == "ridgeline" and on_gpu else shape.stored
    if backend == "ridgeline":
        names = [] if on_gpu else ["int8", "int4"]
    else:
        names = [name for name, unit in (("fp8", "fp8"), ("nvfp4", "fp4")) if unit in chip.flops] + ["int4"]
    size = shape.weight_bytes(stored)
    smaller = [Precision.named(name) for name in names]
    return [stored, *(p for p in smaller if shape.weight_bytes(p) < 0.9 * size)]


def _precisions(
    request: PlanRequest, engine: str, candidate: Candidate, served: float, rate: float
) -> tuple[PrecisionFigures, ...]:
    """Every precision by the same analytic times, scaled to the simulation of the chosen one."""
    scale = served / candidate.requests_per_s
    asked = replace(request, precision=None)
    options = [(engine, precision) for precision in precisions_for(asked, engine)]
    if engine == "ridgeline" and request.chip.name != "cpu":  # ridgeline supports only 16 bits on GPUs
        options += [("vllm", precision) for precision in precisions_for(asked, "vllm")[1:]]
    figures = []
    for backend, precision in options:
        name = str(precision) if backend == engine else f"{precision} ({backend})"
        found, refused = _candidates_with(request, backend, precision)
        counted = [(math.ceil(rate / (w.requests_per_s * scale) - 1e-9) * w.gpus, w) for w in found]
        if not counted:
            figures.append(PrecisionFigures(name, None, None, None, refused[0].why if refused else ""))
            continue
        gpus, best = min(counted, key=lambda pair: (pair[0], pair[1].tpot.mid))
        price = request.usd_per_gpu_hour
        usd = None if price is None else gpus * price * HOURS_PER_MONTH
        figures.append(PrecisionFigures(name, gpus, usd, scale * best.requests_per_s / best.gpus))
    return tuple(figures)


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
