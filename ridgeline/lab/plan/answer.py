"""Question and Plan: what is asked, with everything looked up, and the answer to it. Data alone.

`make` turns one into the other; `result`, `text` and `html` show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.lab.hardware import Chip
from ridgeline.lab.perfmodel.intervals import unlike
from ridgeline.lab.perfmodel.roofline import Roofline
from ridgeline.lab.plan.ask import Budget, Demand
from ridgeline.lab.plan.break_even import BreakEven
from ridgeline.lab.plan.decide import PrecisionFigures
from ridgeline.lab.plan.estimate import Estimate, Times, verdict
from ridgeline.lab.plan.prices import Offers
from ridgeline.lab.plan.residuals import Correction
from ridgeline.lab.plan.search import Way
from ridgeline.lab.plan.settings import EngineSettings, model_setting
from ridgeline.lab.plan.sharing import Sharing
from ridgeline.lab.prediction import Interval
from ridgeline.lab.slo import Slo
from ridgeline.models.files.hub import hub_id
from ridgeline.models.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Question:
    model: str  # as it was asked for
    shape: ModelShape
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
    no_offers: str = ""  # why there are none
    busy_hours: float = 24.0
    users: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, as asked for

    @property
    def name(self) -> str:
        """What a server calls the model; predictions, residuals and fitted step times are kept by it."""
        if (on_hub := hub_id(self.model)) is not None:
            return on_hub.partition("@")[0]
        path = Path(model_setting(self.model))
        if path.suffix == ".json":
            return self.shape.name
        return path.stem if path.suffix == ".gguf" else path.name

    @property
    def hardware(self) -> str:
        """What predictions and residuals are kept by: a CPU is this one, not any."""
        return f"cpu: {self.chip.title}" if self.chip.name == "cpu" else self.chip.name


@dataclass(frozen=True, slots=True)
class Plan:
    question: Question
    way: Way
    engine: str
    engine_refusal: str  # why it is not ridgeline; empty where it is
    settings: EngineSettings
    times: Times
    replicas: int
    capacity: float  # arrivals per second that one replica serves within the service level
    share: Demand  # what one replica gets
    estimate: Estimate
    metrics: dict[str, Interval]  # the estimate's, corrected by what earlier ones missed by
    corrected: dict[str, Correction]
    prefill: Roofline
    decode: Roofline
    precisions: tuple[PrecisionFigures, ...]  # as stored first
    ideal: Sharing
    kept: Sharing
    even: BreakEven | None
    usd_per_hour: float | None
    usd_per_mtok: Interval | None  # input and output together

    @property
    def gpus(self) -> int:
        return self.replicas * self.way.gpus

    @property
    def rate(self) -> float:
        """Arrivals per second of the whole service."""
        assert self.share.rate is not None
        return self.question.demand.rate or self.share.rate

    @property
    def method(self) -> str:
        return self.times.method

    @property
    def caveats(self) -> tuple[str, ...]:
        """What to know before relying on it, in words."""
        found = [*self.estimate.caveats]
        missed = [
            str(limit)
            for limit in self.question.slo.limits
            if verdict(self.metrics.get(limit.key), limit) == "no"
        ]
        if missed:
            found.append(f"{', '.join(missed)} would be missed, with fewer requests for each replica too")
        if self.method == "analytic":
            unlike_any = unlike(
                self.way.deployment,
                max(1.0, self.estimate.concurrency),
                max(1, round(self.share.mean_input)),
                max(1, round(self.share.mean_output)),
            )
            if unlike_any:
                found.append(
                    f"unlike what the step times are from, so intervals are wider: {'; '.join(unlike_any)}"
                )
        if self.method == "analytic" and self.engine == "ridgeline":
            found.append("`ridgeline plan fit`, while a server runs there, fits its step times: far narrower")
        if self.estimate.failures:
            found.append(f"{self.estimate.failures:.1%} of the requests would be refused: the queue is full")
        if self.engine == "ridgeline" and not _has_weights(self.settings.config.model):
            found.append(f"{self.settings.config.model} has no weights: plan.toml needs a model that has")
        if self.engine != "ridgeline":
            found.append(f"the scheduler that was simulated is ridgeline's; {self.engine} has one of its own")
            kept, stored = self.way.precision, str(self.question.shape.stored)
            if kept != stored and (kept != "fp8" or self.engine == "trtllm"):
                found.append(
                    f"{self.question.name} is stored in {stored}: {self.engine} has to be given a checkpoint "
                    f"of it in {kept}, in place of the name in the command"
                )
        if self.replicas > 1:
            found.append(f"requests are taken to be spread evenly over {self.replicas} replicas")
        if self.question.offers is not None and not self.question.offers.typical.same_model:
            found.append(f"the hosted price is of another model: {self.question.offers.typical.model}")
        return tuple(found)


def _has_weights(model: str) -> bool:
    """Whether a path has something to serve; short names and the hub's are fetched."""
    path = Path(model)
    if not path.exists():
        return True
    return path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.safetensors")))
