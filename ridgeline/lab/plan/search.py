"""Finds the cheapest deployment for the demand: tries every precision and every split.

Called by `make_plan`. A deployment's capacity is the largest batch that memory and the service level allow,
by the analytic times. If nothing is feasible, Infeasible names the binding constraint and the nearest
alternative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.lab.charts import grouped
from ridgeline.lab.errors import Infeasible
from ridgeline.lab.hardware.chip import CPU, Chip
from ridgeline.lab.perfmodel.deployment import Deployment
from ridgeline.lab.perfmodel.memory import MOST_CHIPS, MemoryNeeds, memory_plan
from ridgeline.lab.perfmodel.parallel import expert_split
from ridgeline.lab.perfmodel.step_formula import predict_tpot, predict_ttft
from ridgeline.lab.plan.demand import Demand
from ridgeline.lab.prediction import Interval
from ridgeline.lab.slo import Slo
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision

HEADROOM = 0.8  # of a replica's capacity; above it, queues grow unpredictably
MAX_BATCH = 1024
MARGIN = 1.1  # on a proposed limit: a simulated percentile is above the analytic value
TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a replica, and its performance at the largest allowed batch."""

    deployment: Deployment
    memory: MemoryNeeds
    batch: int
    bound: str  # what limits the batch: "memory", "tpot", "ttft" or "batch cap"
    tpot: Interval  # seconds, at that batch
    ttft: Interval
    requests_per_s: float  # at that batch, without queueing

    @property
    def precision(self) -> str:
        return str(self.deployment.kept)

    @property
    def gpus(self) -> int:
        return self.deployment.gpus

    def replicas(self, rate: float) -> int:
        return max(1, math.ceil(rate / (HEADROOM * self.requests_per_s) - 1e-9))


@dataclass(frozen=True, slots=True)
class RejectedCandidate:
    """An infeasible candidate, and by how much: `kind` orders them from far to near."""

    deployment: Deployment
    kind: str  # "memory", "tpot" or "ttft"
    why: str
    best_s: float = math.inf  # the best value it could reach
    needed: int | None = None  # chips with enough memory; None: no number suffices


def candidates(
    shape: ModelSpec,
    chip: Chip,
    demand: Demand,
    slo: Slo,
    *,
    backend: str,
    precisions: Sequence[Precision | str],
    kv_precision: str,
    gpus_max: int,
    max_batch: int = MAX_BATCH,
) -> tuple[list[Candidate], list[RejectedCandidate]]:
    """Every candidate within `gpus_max` chips, and the infeasible ones with the reason."""
    found: list[Candidate] = []
    refused: list[RejectedCandidate] = []
    for precision in precisions:
        for tp, pp in splits(shape, chip, backend, gpus_max):
            outcome = consider(
                Deployment(
                    shape, chip, backend, precision, kv_precision, tp=tp, pp=pp, ep=expert_split(shape, tp)[0]
                ),
                demand,
                slo,
                max_batch,
            )
            if isinstance(outcome, Candidate):
                found.append(outcome)
            else:
                refused.append(outcome)
    return found, refused


def consider(
    deployment: Deployment, demand: Demand, slo: Slo, max_batch: int = MAX_BATCH
) -> Candidate | RejectedCandidate:
    """The largest batch of a deployment that memory and the service level allow."""
    memory = _memory(deployment, demand, deployment.tp, deployment.pp)
    if memory.requests_that_fit < 1:
        why = memory_reason(deployment, memory)
        return RejectedCandidate(deployment, "memory", why, needed=_fewest_chips(deployment, demand))
    isl, osl = max(1, round(demand.mean_input)), max(1, round(demand.mean_output))
    bounds = slo.bounds_ms()
    tpot_limit = bounds.get("tpot_ms", math.inf) / 1e3
    ttft_limit = min(bounds.get("ttft_ms", math.inf), bounds.get("ttft_sched_ms", math.inf)) / 1e3

    alone_tpot = predict_tpot(deployment, 1, isl, osl)
    if alone_tpot.mid > tpot_limit:
        return RejectedCandidate(deployment, "tpot", tpot_reason(deployment, alone_tpot), alone_tpot.mid)
    alone_ttft = predict_ttft(deployment, 1, isl, osl)
    if alone_ttft.mid > ttft_limit:
        return RejectedCandidate(deployment, "ttft", ttft_reason(deployment, alone_ttft, isl), alone_ttft.mid)
    most = min(max_batch, memory.requests_that_fit)
    batch = _largest(most, lambda size: predict_tpot(deployment, size, isl, osl).mid <= tpot_limit)
    bound = "tpot" if batch < most else "memory" if most < max_batch else "batch cap"
    tpot, ttft = predict_tpot(deployment, batch, isl, osl), predict_ttft(deployment, batch, isl, osl)
    took = ttft.mid + (osl - 1) * tpot.mid
    return Candidate(deployment, memory, batch, bound, tpot, ttft, batch / took)


def cheapest(found: Sequence[Candidate], rate: float | None, gpus_max: int) -> Candidate | None:
    """Fewest GPUs for the rate; without a rate, most requests per GPU. Ties: the faster one."""
    if rate is None:
        return max(
            found,
            key=lambda candidate: (candidate.requests_per_s / candidate.gpus, -candidate.tpot.mid),
            default=None,
        )
    within = [candidate for candidate in found if candidate.replicas(rate) * candidate.gpus <= gpus_max]
    return min(
        within,
        key=lambda candidate: (candidate.replicas(rate) * candidate.gpus, candidate.tpot.mid),
        default=None,
    )


def refuse_rate(found: Sequence[Candidate], rate: float, gpus_max: int) -> Infeasible:
    """No candidate has enough GPUs for the rate: report the feasible rate and the needed GPUs."""
    best = max(found, key=lambda candidate: (gpus_max // candidate.gpus) * candidate.requests_per_s)
    served = HEADROOM * (gpus_max // best.gpus) * best.requests_per_s
    needed = min(candidate.replicas(rate) * candidate.gpus for candidate in found)
    if best.deployment.chip.name == CPU:
        return Infeasible(
            f"{rate:g} requests/s are more than this machine serves: {served:.3g} requests/s "
            f"({_how(best.deployment)}), bound by {best.bound} at a batch of {best.batch}. Nearest: "
            f"--rate {served:.3g}, a smaller model, or --hardware with a GPU"
        )
    return Infeasible(
        f"{rate:g} requests/s need {needed} {best.deployment.chip.name}, and --gpus-max is {gpus_max}: "
        f"one replica ({_how(best.deployment)}) serves {HEADROOM * best.requests_per_s:.3g} requests/s, "
        f"bound by {best.bound} at a batch of {best.batch}. Nearest: --rate {served:.3g}, or "
        f"--gpus-max {needed}"
    )


def refuse_all(refused: Sequence[RejectedCandidate], slo: Slo, gpus_max: int) -> Infeasible:
    """No candidate is feasible: report the nearest one's constraint, and the limit it would keep."""
    near = [r for r in refused if r.kind == "ttft"] or [r for r in refused if r.kind == "tpot"]
    if near:
        best = min(near, key=lambda r: r.best_s)
        bound = [limit for limit in slo.limits if limit.metric.startswith(best.kind)]
        limit = min(bound, key=lambda limit: limit.ms)
        reached = math.ceil(MARGIN * best.best_s * 1e4) / 10
        return Infeasible(
            f"{limit} cannot be met: {best.why}. Nearest: {limit.metric}_p{limit.percentile}={reached:.10g}ms"
        )
    best = min(refused, key=lambda r: (r.needed or math.inf, r.deployment.all_bytes))
    ways_out = ["a smaller --precision or model", "a chip with more memory", "shorter requests"]
    if best.needed is not None:
        ways_out = [f"--gpus-max {best.needed}", *ways_out[:1]]
    return Infeasible(f"the model does not fit: {best.why}. Nearest: {', or '.join(ways_out)}")


def memory_reason(deployment: Deployment, memory: MemoryNeeds) -> str:
    chip, size = deployment.chip, f"{deployment.chip.memory_bytes / 1e9:.0f} GB"
    where = f"the {size} that are free" if chip.name == CPU else f"the {size} of each {chip.name}"
    text = f"{memory.weights / 1e9:.3g} GB of weights ({_how(deployment)}) in {where}"
    if memory.kv_room > 0:
        return (
            f"{text} leave {memory.kv_room / 1e9:.3g} GB for the cache, and one request of the mean length "
            f"takes {memory.kv_per_request / 1e9:.3g} GB of it"
        )
    others = memory.reserve + memory.activations
    return f"{text} beside {others / 1e9:.3g} GB for activations and the system"


def tpot_reason(deployment: Deployment, alone: Interval) -> str:
    floor = deployment.linear_bytes / deployment.chip.bytes_per_s
    return (
        f"TPOT ≥ {grouped(1e3 * alone.mid)} ms on {deployment.chip.name} with {_how(deployment)}, even for "
        f"one request alone: bytes over bandwidth ({deployment.linear_bytes / 1e9:.3g} GB a chip, "
        f"{grouped(1e3 * floor)} ms at the datasheet's rate)"
    )


def ttft_reason(deployment: Deployment, alone: Interval, isl: int) -> str:
    flops = deployment.shape.flops(isl, 0)
    return (
        f"TTFT ≥ {grouped(1e3 * alone.mid)} ms on {deployment.chip.name} with {_how(deployment)}, even for "
        f"one request alone: {isl:,} prompt tokens are {flops / 1e12:.3g} TFLOP"
    )


def splits(shape: ModelSpec, chip: Chip, backend: str, gpus_max: int) -> Iterator[tuple[int, int]]:
    """(tp, pp) to try: tensor parallel within the fast link's reach, pipelines beyond."""
    if backend == "ridgeline":
        yield 1, 1
        return
    heads = [getattr(kind.mixer, "heads", 0) for kind, _ in shape.kinds if kind.mixer is not None]
    reach = min(gpus_max, chip.link_domain)
    sizes = [tp for tp in TP_SIZES if tp <= reach and all(count % tp == 0 for count in heads)]
    yield from ((tp, 1) for tp in sizes)
    stages = 2
    while sizes and stages * sizes[-1] <= gpus_max and stages <= len(shape.layers):
        yield sizes[-1], stages
        stages *= 2


def _memory(deployment: Deployment, demand: Demand, tp: int, pp: int) -> MemoryNeeds:
    return memory_plan(
        deployment.shape,
        deployment.chip,
        deployment.precision,
        deployment.kv_element,
        tp,
        pp,
        max(1, round(demand.mean_input)),
        max(1, round(demand.mean_output)),
        whole_windows=deployment.backend == "ridgeline",
    )


def _fewest_chips(deployment: Deployment, demand: Demand) -> int | None:
    """The smallest number of chips to try for which memory suffices."""
    shape, chip, backend = deployment.shape, deployment.chip, deployment.backend
    tried = {tp * pp: (tp, pp) for tp, pp in splits(shape, chip, backend, MOST_CHIPS)}
    for gpus, (tp, pp) in sorted(tried.items()):
        if _memory(deployment, demand, tp, pp).fits:
            return gpus
    return None


def _largest(most: int, is_allowed: Callable[[int], bool]) -> int:
    """The largest allowed batch up to `most`; 1 is allowed, and if one is not, no larger one is."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_allowed(middle) else (low, middle - 1)
    return low


def _how(deployment: Deployment) -> str:
    candidates = [
        f"{name}={getattr(deployment, name)}" for name in ("tp", "pp", "ep") if getattr(deployment, name) > 1
    ]
    return ", ".join([str(deployment.kept), *(candidates or ["tp=1"])])
