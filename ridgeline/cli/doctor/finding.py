"""One line of `ridgeline doctor`: what was looked at, what was found, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "slow", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    status: Status
    subject: str
    value: str
    advice: str = ""
    fatal: bool = False  # models cannot be served while this holds
