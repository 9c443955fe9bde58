"""FormatQuality and FormatFigures: the gate's verdict about a weight format, and what serving it takes.

Plain data: `quality` and `choose` fill it in, the decision list and the reports show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ridgeline.lab.evaluate.verdicts import QualityVerdict

Status = Literal["as stored", "not quantized", "passed", "failed", "not gated"]
Speed = Literal["measured", "predicted"]


@dataclass(frozen=True, slots=True)
class FormatQuality:
    """command: the gate of this format; "" for weights as stored or in 16 bits and more, which need none."""

    status: Status
    command: str = ""
    verdict: QualityVerdict | None = None
    matched: str = ""  # how the verdict's model is known to be the planned one: ModelIdentity.same_as

    @property
    def words(self) -> str:
        if self.verdict is None:
            return "NOT GATED" if self.status == "not gated" else self.status
        return self.verdict.words

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {"status": self.status, "command": self.command or None}
        if self.verdict is None:
            return found
        verdict = msgspec.to_builtins(self.verdict)
        return found | {"items": self.verdict.items, "matched_by": self.matched, "verdict": verdict}


AS_STORED = FormatQuality("as stored")


@dataclass(frozen=True, slots=True)
class FormatFigures:
    """Cost and capacity of one format, for the same traffic and service level."""

    precision: str
    gpus: int | None  # None: misses the service level; see `why`
    usd_month: float | None
    per_gpu: float | None  # requests per second that one GPU serves
    why: str = ""
    speed: Speed = "predicted"  # measured: simulated with step times that were fitted to this format here
    quality: FormatQuality = AS_STORED

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "precision": self.precision,
            "gpus": self.gpus,
            "usd_month": self.usd_month,
            "requests_per_s_per_gpu": self.per_gpu,
            "speed": self.speed,
            "why_not": self.why or None,
            "quality": self.quality.facts(),
        }
