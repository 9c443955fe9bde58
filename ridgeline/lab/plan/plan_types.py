"""PlanRequest and Plan: the resolved inputs of a plan, and its result. Plain data.

`make_plan` turns one into the other; `reports` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.lab.evaluate.verdicts import QualityVerdict
from ridgeline.lab.hardware.chip import CPU, Chip
from ridgeline.lab.model_identity import ModelIdentity
from ridgeline.lab.perfmodel.deployment import Deployment
from ridgeline.lab.perfmodel.intervals import unlike
from ridgeline.lab.perfmodel.roofline import Roofline
from ridgeline.lab.plan.break_even import BreakEven
from ridgeline.lab.plan.choose_step_times import Times
from ridgeline.lab.plan.demand import Budget, Demand
from ridgeline.lab.plan.prices import Offers
from ridgeline.lab.plan.quantization.figures import FormatFigures
from ridgeline.lab.plan.residuals import Correction
from ridgeline.lab.plan.search import Candidate
from ridgeline.lab.plan.settings import EngineSettings, model_setting
from ridgeline.lab.plan.sharing import Sharing
from ridgeline.lab.plan.simulated_estimate import Estimate, verdict
from ridgeline.lab.prediction import Interval
from ridgeline.lab.slo import Slo
from ridgeline.models.files.hub import hub_id
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import WHOLE


@dataclass(frozen=True, slots=True)
class PlanRequest:
    model: str  # as given
    shape: ModelSpec
    chip: Chip
    demand: Demand
    slo: Slo
    gpus_max: int
    engine: str = "auto"
    precision: str | None = None
    kv_precision: str = "bfloat16"
    budget: Budget | None = None
    usd_per_gpu_hour: float | None = None
    offers: Offers | None = None
    no_offers: str = ""  # why there are no offers
    busy_hours: float = 24.0
    users: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, as given
    identity: ModelIdentity = field(default_factory=lambda: ModelIdentity(""))
    verdicts: tuple[QualityVerdict, ...] = ()  # of quality gates, about any model
    ungated: bool = False  # weight formats without a verdict may be chosen

    @property
    def name(self) -> str:
        """The model's name on a server; predictions, residuals and fitted step times are stored under it."""
        if (on_hub := hub_id(self.model)) is not None:
            return on_hub.partition("@")[0]
        path = Path(model_setting(self.model))
        if path.suffix == ".json":
            return self.shape.name
        return path.stem if path.suffix == ".gguf" else path.name

    @property
    def hardware(self) -> str:
        """Predictions and residuals are stored under it: a CPU is this one, not any."""
        return f"cpu: {self.chip.title}" if self.chip.name == "cpu" else self.chip.name


@dataclass(frozen=True, slots=True)
class Plan:
    request: PlanRequest
    candidate: Candidate
    engine: str
    engine_refusal: str  # why it is not ridgeline; empty if it is
    settings: EngineSettings
    times: Times
    replicas: int
    capacity: float  # arrivals per second that one replica serves within the service level
    share: Demand  # one replica's traffic
    estimate: Estimate
    metrics: dict[str, Interval]  # of the estimate, corrected by earlier residuals
    corrected: dict[str, Correction]
    prefill: Roofline
    decode: Roofline
    formats: tuple[FormatFigures, ...]  # as stored first
    chosen_format: FormatFigures
    ideal: Sharing
    kept: Sharing
    even: BreakEven | None
    usd_per_hour: float | None
    usd_per_mtok: Interval | None  # input and output together

    @property
    def gpus(self) -> int:
        return self.replicas * self.candidate.gpus

    @property
    def rate(self) -> float:
        """Arrivals per second of the whole service."""
        assert self.share.rate is not None
        return self.request.demand.rate or self.share.rate

    @property
    def method(self) -> str:
        return self.times.method

    @property
    def caveats(self) -> tuple[str, ...]:
        """Notes for the reader of the plan."""
        found = [*self.estimate.caveats]
        missed = [
            str(limit)
            for limit in self.request.slo.limits
            if verdict(self.metrics.get(limit.key), limit) == "no"
        ]
        if missed:
            found.append(f"{', '.join(missed)} would be missed, even with fewer requests per replica")
        if self.method == "analytic":
            unlike_any = unlike(
                self.candidate.deployment,
                max(1.0, self.estimate.concurrency),
                max(1, round(self.share.mean_input)),
                max(1, round(self.share.mean_output)),
            )
            if unlike_any:
                found.append(f"beyond the fitted step times, so intervals are wider: {'; '.join(unlike_any)}")
        if self.method == "analytic" and self.engine == "ridgeline":
            found += _unmeasured_formats(self.candidate.deployment)
            found.append(
                "run `ridgeline plan fit` against a server on this hardware for much narrower intervals"
            )
        if self.estimate.failures:
            found.append(f"{self.estimate.failures:.1%} of the requests would be refused: the queue is full")
        if self.engine == "ridgeline" and not _has_weights(self.settings.config.model):
            found.append(f"{self.settings.config.model} has no weights: plan.toml needs a model with weights")
        if self.engine != "ridgeline":
            found.append(f"the simulated scheduler is ridgeline's; {self.engine} has its own")
            kept, stored = self.candidate.precision, str(self.request.shape.stored)
            if kept != stored and (kept != "fp8" or self.engine == "trtllm"):
                found.append(
                    f"{self.request.name} is stored in {stored}: {self.engine} needs a checkpoint "
                    f"of it in {kept}, in place of the name in the command"
                )
        found += _quality_caveats(self.chosen_format)
        if self.replicas > 1:
            found.append(f"requests are assumed to be spread evenly over {self.replicas} replicas")
        if self.request.offers is not None and not self.request.offers.typical.same_model:
            found.append(f"the hosted price is for another model: {self.request.offers.typical.model}")
        return tuple(found)


def _unmeasured_formats(deployment: Deployment) -> Iterator[str]:
    """On a GPU: formats that are computed as stored or as asked for, and not proposed."""
    if deployment.chip.name == CPU:
        return
    kept = deployment.kept
    formats = [f"weights in {kept}"] if {kept.attention, kept.linear, kept.experts} - set(WHOLE) else []
    formats += [f"keys and values in {deployment.kv_precision}"] * (deployment.kv_precision not in WHOLE)
    if formats:
        yield f"ridgeline's speed on a GPU with {' and '.join(formats)} is not measured: the formula's counts"


def _quality_caveats(chosen: FormatFigures) -> Iterator[str]:
    quality = chosen.quality
    if quality.status == "not gated":
        yield (
            f"{chosen.precision} is not gated: how much its answers lose is not known; the command under "
            "Weight formats gates it"
        )
    if quality.verdict is not None and quality.matched == "repository":
        yield (
            f"the quality gate ran {quality.verdict.served.model.repo}; whether it had the same commit of it "
            "is not known"
        )
    if quality.verdict is not None and quality.verdict.served.stated:
        yield f"the gate's candidate was a server: that it served {chosen.precision} is as stated"


def _has_weights(model: str) -> bool:
    """Whether a path contains weights; short names and hub ids are fetched."""
    path = Path(model)
    if not path.exists():
        return True
    return path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.safetensors")))
