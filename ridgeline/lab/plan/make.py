"""make_plan: from a question to a plan: the way to serve it, what it will measure, what it costs, and why.

Called by `cli.lab.plan`. The search is analytic, the prediction simulated on the user's own traffic, the
costs by the hour; `decide` has the gates. Says Infeasible, with the nearest that would do, rather than a
bad plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ridgeline.lab.errors import BadInput, Infeasible
from ridgeline.lab.hardware import Chip
from ridgeline.lab.perfmodel.operators import Phase
from ridgeline.lab.perfmodel.roofline import Roofline, study
from ridgeline.lab.plan import search
from ridgeline.lab.plan.answer import Plan, Question
from ridgeline.lab.plan.ask import Demand
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH, BreakEven, Profile, break_even, hourly_profile
from ridgeline.lab.plan.decide import PrecisionFigures
from ridgeline.lab.plan.engines import ridgeline_refusal
from ridgeline.lab.plan.estimate import ROUGHLY, Estimate, Times, capacity, estimate, verdict
from ridgeline.lab.plan.refusals import check_budget, check_gpus, refuse_latency
from ridgeline.lab.plan.residuals import Correction, corrections, read_residuals
from ridgeline.lab.plan.search import Refused, Way
from ridgeline.lab.plan.settings import EngineSettings, engine_settings
from ridgeline.lab.plan.sharing import sharing
from ridgeline.lab.plan.times import times_of
from ridgeline.lab.prediction import Interval
from ridgeline.lab.traffic.request import Traffic
from ridgeline.models.shapes import Precision

Report = Callable[[str], None]
OPEN_RATE = 0.9  # of the capacity, where no rate was asked for
TRIES, FEWER = 4, 0.9  # with so much less for each replica, where the whole traffic misses a limit
PROVIDER_CACHE_S = 300.0  # how long hosted APIs keep a prefix that nobody asks for; five minutes is usual


def make_plan(question: Question, report: Report = lambda text: None) -> Plan:
    _check_lengths(question)
    if question.budget is not None and question.usd_per_gpu_hour is None:
        raise BadInput(f"a budget needs the price of an hour of {question.chip.name}: give --gpu-price")
    report("trying precisions and splits")
    engine, refusal, found, refused = _ways(question)
    demand, slo, chip = question.demand, question.slo, question.chip
    way = search.cheapest(found, demand.rate, question.gpus_max)
    if way is None:
        if found and demand.rate is not None:
            raise search.refuse_rate(found, demand.rate, question.gpus_max)
        raise search.refuse_all(refused, slo, question.gpus_max)
    settings = engine_settings(question.model, way, demand, given=question.settings)
    times = times_of(question.name, way, demand, settings.config)
    report("looking for one replica's capacity")
    served, at = capacity(demand, settings.limits, times, slo)
    if not served:
        raise refuse_latency(question, way, at)
    sized = _sized(question, way, settings, times, served, report)
    replicas, rate, served, share = sized.replicas, sized.rate, sized.served, sized.share
    usd_per_hour = None
    if question.usd_per_gpu_hour is not None:
        usd_per_hour = question.usd_per_gpu_hour * replicas * way.gpus
    report("counting")
    operating = max(1, round(sized.estimate.concurrency))
    return Plan(
        question=question,
        way=way,
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
        prefill=_study(way, chip, "prefill", 1, demand, settings),
        decode=_study(way, chip, "decode", operating, demand, settings),
        precisions=_precisions(question, engine, way, served, rate),
        ideal=sharing(_profiled(question, share)),
        kept=sharing(share.traffic, cache_tokens=_cache_tokens(settings, sized.estimate)),
        even=_even(question, way, served, share),
        usd_per_hour=usd_per_hour,
        usd_per_mtok=_usd_per_mtok(question, way, settings, times, sized, report),
    )


# ── which way ────────────────────────────────────────────────────────────────────────────────────────────


def _check_lengths(question: Question) -> None:
    longest, most = question.demand.longest, question.shape.max_context
    if longest > most:
        raise BadInput(
            f"{question.shape.name} reads at most {most:,} tokens, and the longest request has {longest:,}: "
            f"--max-context {most} cuts prompts to it"
        )


def _ways(question: Question) -> tuple[str, str, list[Way], list[Refused]]:
    """Our own engine where it can, else vLLM's times; an engine that was asked for, or nothing."""
    refusal = ridgeline_refusal(question.model, question.chip, question.precision, question.kv_precision)
    if question.engine not in ("auto", "ridgeline"):
        found, refused = _tried(question, question.engine)
        return question.engine, "another engine was asked for", found, refused
    if refusal and (question.engine == "ridgeline" or question.chip.name == "cpu"):
        raise Infeasible(f"ridgeline does not serve this: {refusal}")
    refused = []
    if not refusal:
        found, refused = _tried(question, "ridgeline")
        fits = search.cheapest(found, question.demand.rate, question.gpus_max)
        if fits or question.engine == "ridgeline" or question.chip.name == "cpu":
            return "ridgeline", "", found, refused
        refusal = f"on one GPU, {refused[0].why}" if refused else "one GPU a replica is not enough"
    found, more = _tried(question, "vllm")
    return "vllm", refusal, found, [*refused, *more]


def _tried(question: Question, backend: str) -> tuple[list[Way], list[Refused]]:
    """As stored, or as asked for; smaller formats only where that does not do."""
    first: list[Way] | None = None
    every: list[Refused] = []
    for precision in precisions_for(question, backend):
        found, refused = _ways_with(question, backend, precision)
        every += refused
        if search.cheapest(found, question.demand.rate, question.gpus_max) is not None:
            return found, every
        first = found if first is None else first
    return first or [], every


def _ways_with(question: Question, backend: str, precision: Precision) -> tuple[list[Way], list[Refused]]:
    return search.ways(
        question.shape,
        question.chip,
        question.demand,
        question.slo,
        backend=backend,
        precisions=[precision],
        kv_precision=question.kv_precision,
        gpus_max=question.gpus_max,
    )


def precisions_for(question: Question, backend: str) -> list[Precision]:
    """The one to plan with first, then those that are smaller and that chip and engine have."""
    shape, chip = question.shape, question.chip
    if question.precision is not None:
        return [Precision.named(question.precision)]
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
    question: Question, engine: str, way: Way, served: float, rate: float
) -> tuple[PrecisionFigures, ...]:
    """Every precision by the same analytic times, scaled to what the simulation found for the chosen one."""
    scale = served / way.requests_per_s
    asked = replace(question, precision=None)
    options = [(engine, precision) for precision in precisions_for(asked, engine)]
    if engine == "ridgeline" and question.chip.name != "cpu":  # which has 16 bits alone there
        options += [("vllm", precision) for precision in precisions_for(asked, "vllm")[1:]]
    figures = []
    for backend, precision in options:
        name = str(precision) if backend == engine else f"{precision} ({backend})"
        found, refused = _ways_with(question, backend, precision)
        counted = [(math.ceil(rate / (w.requests_per_s * scale) - 1e-9) * w.gpus, w) for w in found]
        if not counted:
            figures.append(PrecisionFigures(name, None, None, None, refused[0].why if refused else ""))
            continue
        gpus, best = min(counted, key=lambda pair: (pair[0], pair[1].tpot.mid))
        price = question.usd_per_gpu_hour
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
    question: Question, way: Way, settings: EngineSettings, times: Times, served: float, report: Report
) -> _Sized:
    """As many replicas as keep the limits on the whole traffic, corrected by earlier misses.

    A capacity is looked for on the beginning of the traffic; where all of it takes more, replicas are added.
    """
    factors = corrections(
        read_residuals(), hardware=question.hardware, model=question.name, method=times.method
    )
    first: _Sized | None = None
    for _ in range(TRIES):
        rate = OPEN_RATE * served if question.demand.rate is None else question.demand.rate
        replicas = max(1, math.ceil(rate / served - 1e-9))
        check_gpus(question, way, replicas, served)
        share = question.demand.share(rate / replicas)
        check_budget(question, way, replicas, served, _profile(question, share))
        report(f"simulating {replicas} replica{'s' * (replicas > 1)}")
        found = estimate(share, settings.limits, times, question.slo)
        known = {name: factors[name] for name in found.metrics if name in factors}
        metrics = {
            name: known[name].apply(interval) if name in known else interval
            for name, interval in found.metrics.items()
        }
        sized = _Sized(replicas, rate, served, share, found, metrics, known)
        if all(verdict(metrics.get(limit.key), limit) != "no" for limit in question.slo.limits):
            return sized
        first = first or sized
        served = FEWER * rate / replicas
    assert first is not None
    return first  # fewer requests do not help: the plan says which limit is missed


# ── what it takes ────────────────────────────────────────────────────────────────────────────────────────


def _study(
    way: Way, chip: Chip, phase: Phase, batch: int, demand: Demand, settings: EngineSettings
) -> Roofline:
    prompt = max(1, min(settings.limits.prefill_chunk, round(demand.mean_input)))
    context = 0 if phase == "prefill" else round(demand.mean_input + demand.mean_output / 2)
    deployment = way.deployment
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
    """What live sequences leave of the KV memory, when most of it is held."""
    return settings.limits.num_blocks * settings.limits.block_size * max(0.0, 1 - found.kv_peak)


def _even(question: Question, way: Way, served: float, share: Demand) -> BreakEven | None:
    if question.offers is None or question.usd_per_gpu_hour is None:
        return None
    traffic = _profiled(question, share)
    return break_even(
        _profile(question, share),
        question.offers.typical,
        cached_share=sharing(traffic, kept_s=PROVIDER_CACHE_S).share,
        replica_usd_per_hour=question.usd_per_gpu_hour * way.gpus,
        replica_requests_per_s=served * question.demand.requests_per_arrival,
    )


def _profiled(question: Question, share: Demand) -> Traffic:
    """The whole service's traffic; without a rate, that of the one replica."""
    return share.traffic if question.demand.rate is None else question.demand.traffic


def _profile(question: Question, share: Demand) -> Profile:
    return hourly_profile(_profiled(question, share), busy_hours=question.busy_hours)


def _usd_per_mtok(
    question: Question, way: Way, settings: EngineSettings, times: Times, sized: _Sized, report: Report
) -> Interval | None:
    """Over the month, idle hours included; the ends are what replicas serve with steps as fast and as slow
    as they may be. Without a rate each end has a replica's own; infinite where none keeps the limits."""
    if question.usd_per_gpu_hour is None:
        return None
    month = _profile(question, sized.share).month()
    mtok = (month.input_tokens + month.output_tokens) / 1e6
    replica = question.usd_per_gpu_hour * way.gpus * HOURS_PER_MONTH / mtok

    def usd(factor: float) -> float:
        steps = replace(times, steps=times.steps.scaled(factor))
        served, _ = capacity(question.demand, settings.limits, steps, question.slo, ROUGHLY)
        if not served:
            return math.inf
        if question.demand.rate is None:
            return replica * sized.served / served
        return replica * math.ceil(sized.rate / served - 1e-9)

    mid = replica * sized.replicas
    report("pricing the ends of the interval")
    if question.demand.rate is None:
        return Interval(min(mid, usd(times.low)), mid, max(mid, usd(times.high)))
    fast = mid if sized.replicas == 1 else usd(times.low)
    verdicts = [verdict(sized.metrics.get(limit.key), limit) for limit in question.slo.limits]
    # Limits that are kept at the slow end take no replica more, those that are missed there at least one.
    slow = mid if all(found == "yes" for found in verdicts) else max(mid + replica, usd(times.high))
    return Interval(min(mid, fast), mid, slow)
