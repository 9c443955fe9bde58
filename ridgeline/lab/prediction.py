"""Prediction: a plan's predicted metrics of a run, with intervals; `plan` writes it, `plan verify` scores it.

Metrics have the names of a run's summary: "ttft_ms.p50", "ttft_ms.p90", "tpot_ms.p50", "output_tokens_per_s".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ridgeline.lab.errors import BadInput

VERSION = 1


class Interval(msgspec.Struct, frozen=True):
    """The most likely value, and the range that covers the truth in `coverage` of all cases."""

    low: float
    mid: float
    high: float
    coverage: float = 0.8

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


class Prediction(msgspec.Struct, frozen=True):
    model: str
    hardware: str
    method: str  # "simulated" with a fitted step-time model, or "analytic"
    engine: dict[str, Any]  # settings of the engine that differ from their defaults
    traffic: dict[str, Any]  # its description: source, rate, lengths, seed
    metrics: dict[str, Interval]
    uncorrected: dict[str, Interval] = {}  # of corrected metrics: the values before correction
    formats: list[dict[str, Any]] = []  # weight formats: speed, and the verdict of the quality gate
    caveats: list[str] = []  # what lies outside the fitted range
    made_at: str = ""  # ISO 8601
    version: int = VERSION


def write_prediction(prediction: Prediction, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(prediction), indent=2) + b"\n")


def read_prediction(path: Path) -> Prediction:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Prediction)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not a prediction file: {error}") from error
    if found.version != VERSION:
        raise BadInput(f"{path}: written as version {found.version}, this is version {VERSION}")
    return found
