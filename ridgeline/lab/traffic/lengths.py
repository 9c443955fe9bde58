"""Lengths: token counts of prompts and answers, drawn from a distribution. Never below 1.

2000                  always this many
uniform:LOW,HIGH      every integer from LOW to HIGH equally likely
normal:MEAN,SD        truncated at 1, which raises the mean if SD is close to MEAN
lognormal:MEAN,SIGMA  the mean in tokens; SIGMA of the logarithm (1.0: p99 is 6 × the mean)
cdf:FILE              JSON pairs [tokens, cumulative share]; uniform within each step
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.specs import figures, split_kind, unknown_kind

KINDS = ("fixed", "uniform", "normal", "lognormal", "cdf")


class Lengths(Protocol):
    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.float64]:
        """This many lengths, not rounded: pauses use the same distributions."""


@dataclass(frozen=True, slots=True)
class Fixed:
    value: float

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.float64]:
        return np.full(count, self.value)


@dataclass(frozen=True, slots=True)
class Uniform:
    """For tokens, every integer from low to high; for seconds, every value between them."""

    low: float
    high: float
    is_whole: bool = True

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.float64]:
        if not self.is_whole:
            return random.uniform(self.low, self.high, count)
        return random.integers(round(self.low), round(self.high), count, endpoint=True).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Normal:
    mean: float
    sd: float

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.float64]:
        return random.normal(self.mean, self.sd, count)


@dataclass(frozen=True, slots=True)
class LogNormal:
    mean: float
    sigma: float

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.float64]:
        return random.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count)


@dataclass(frozen=True, slots=True)
class Empirical:
    """A stepwise cumulative distribution: `shares[i]` of all lengths are at most `tokens[i]`."""

    tokens: tuple[float, ...]
    shares: tuple[float, ...]

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.float64]:
        return np.interp(random.random(count), (0.0, *self.shares), (0.0, *self.tokens))


def whole_tokens(drawn: NDArray[np.float64]) -> list[int]:
    """As tokens: rounded, and at least one."""
    found: list[int] = np.maximum(np.rint(drawn), 1).astype(np.int64).tolist()
    return found


def parse_lengths(text: str, field: str = "length") -> Lengths:
    kind, rest = split_kind(text)
    if not rest and ":" not in text and (kind[:1].isdigit() or kind.startswith(("+", "-", "."))):
        kind, rest = "fixed", text.strip()
    if kind == "cdf":
        return read_cdf(Path(rest), field)
    if kind not in KINDS:
        raise unknown_kind(kind, KINDS, field)
    if kind == "fixed":
        (value,) = figures(rest, field, text, "TOKENS")
        return Fixed(_positive(value, "TOKENS", field, text))
    if kind == "uniform":
        low, high = figures(rest, field, text, "LOW,HIGH")
        if not 0 < low <= high:
            raise BadInput(f"{field}: {text!r} needs 0 < LOW ≤ HIGH")
        return Uniform(low, high)
    mean, spread = figures(rest, field, text, "MEAN,SD" if kind == "normal" else "MEAN,SIGMA")
    if spread < 0:
        raise BadInput(f"{field}: the spread of {text!r} must not be negative")
    mean = _positive(mean, "MEAN", field, text)
    return Normal(mean, spread) if kind == "normal" else LogNormal(mean, spread)


def parse_seconds(text: str, field: str = "seconds") -> Lengths:
    """The same distributions for pauses: not rounded, and 0 is allowed."""
    if text.strip() == "0":
        return Fixed(0.0)
    found = parse_lengths(text, field)
    return replace(found, is_whole=False) if isinstance(found, Uniform) else found


def read_cdf(path: Path, field: str = "length") -> Empirical:
    """A distribution as JSON: pairs [tokens, cumulative share], both increasing, the last share 1."""
    try:
        pairs = msgspec.json.decode(path.read_bytes(), type=list[tuple[float, float]])
    except OSError as error:
        raise BadInput(f"{field}: {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{field}: {path} is not a list of [tokens, share] pairs: {error}") from error
    if not pairs:
        raise BadInput(f"{field}: {path} holds no pairs")
    before = (0.0, 0.0)
    for number, pair in enumerate(pairs, start=1):
        if pair[0] <= before[0] or pair[1] < before[1] or pair[1] > 1 + 1e-9:
            raise BadInput(
                f"{field}: {path}: pair {number} {list(pair)} does not follow {list(before)}: tokens "
                "must increase, and shares must not decrease or exceed 1"
            )
        before = pair
    if before[1] < 1 - 1e-6:
        raise BadInput(f"{field}: {path}: the last share is {before[1]}, not 1: longer lengths are missing")
    return Empirical(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


def _positive(value: float, name: str, field: str, whole: str) -> float:
    if value <= 0:
        raise BadInput(f"{field}: {name} of {whole!r} must be more than 0")
    return value
