"""StepTimes: predicts a step's time from its work; fitted on step records (`fit_steps`), used by `simulate`.

A step takes a sum of terms with non-negative coefficients: a fixed part, one per token in pieces (a kernel's
cost per token changes with their number), one for prefill attention, one per KV token, one per row.
Decode-only steps have separate coefficients. Outside the fitted range, the interval widens and `out_of_range`
says so. It measures nothing and reads no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from pathlib import Path

import msgspec

from ridgeline.engine.schedule.step import StepWork
from ridgeline.lab.errors import BadInput
from ridgeline.lab.prediction import Interval

VERSION = 1
UNKNOWN_SPREAD = 0.25  # if no trace was held out
QUANTILES = 41  # of the residuals: every 2.5 %, the ends at 0.25 % and 99.75 %
WORDS = {
    "tokens": "tokens in a step",
    "decode_batch": "sequences decoding together",
    "decode_context": "KV tokens read in a step",
    "prefill_context_product": "prompt tokens x context in a step",
}


class Terms(msgspec.Struct, frozen=True):
    """The coefficients of one kind of step, in seconds, and the range they were fitted on.

    knots:  numbers of tokens at which the cost of a further one changes, the first being 0
    ratios: quantiles of measured / predicted seconds
    ranges: lowest and highest value seen of each feature
    """

    fixed_s: float
    knots: tuple[float, ...]
    token_s: tuple[float, ...]
    batch_s: float = 0.0
    context_s: float = 0.0
    context_product_s: float = 0.0
    row_s: float = 0.0
    ratios: tuple[float, ...] = (1.0,)
    ranges: dict[str, tuple[float, float]] = {}
    records: int = 0

    def of_tokens(self, tokens: float) -> float:
        """The fixed part plus the tokens' part."""
        seconds = self.fixed_s
        for place, knot in enumerate(self.knots):
            if tokens <= knot:
                break
            end = self.knots[place + 1] if place + 1 < len(self.knots) else tokens
            seconds += self.token_s[place] * (min(tokens, end) - knot)
        return seconds


class HostTimes(msgspec.Struct, frozen=True):
    """Host work around a step: planning it, and from its result to the next plan."""

    schedule_s: float = 0.0
    schedule_row_s: float = 0.0
    turn_s: float = 0.0
    turn_row_s: float = 0.0

    def schedule(self, rows: int) -> float:
        return self.schedule_s + self.schedule_row_s * rows

    def turn(self, rows: int) -> float:
        """Applying the result, publishing it, receiving new requests."""
        return self.turn_s + self.turn_row_s * rows


class TraceError(msgspec.Struct, frozen=True):
    """How well a held-out trace is predicted, by step and in total."""

    trace: str
    records: int
    median: float  # of |predicted / measured - 1|
    p90: float
    total: float  # predicted / measured seconds of all its steps together, minus 1


class StepTimes(msgspec.Struct, frozen=True):
    """decode:  of steps that only decode
    mixed:   of steps with prompt tokens
    batches: sizes that decode steps are padded to (a GPU's graphs); empty: none
    errors:  of traces held out whole, each by the fit on all others
    about:   machine, model and settings that it holds for
    speeds:  P10 and P90, over stretches of the fit's traffic, of measured / predicted seconds: how much the
             machine's speed changed meanwhile
    load_before: runnable tasks per core before the traffic began; None: unknown
    """

    decode: Terms
    mixed: Terms
    host: HostTimes = HostTimes()
    batches: tuple[int, ...] = ()
    source: str = "fitted"  # or "analytic": from first principles, without measured steps
    fitted_on: tuple[str, ...] = ()
    errors: tuple[TraceError, ...] = ()
    about: dict[str, str] = {}
    made_at: str = ""
    speeds: tuple[float, float] = (1.0, 1.0)
    load_before: float | None = None
    version: int = VERSION

    def seconds(self, work: StepWork) -> float:
        if not work.prefill_tokens:
            base, per_context = self.decode_line(work.decode_batch)
            return base + per_context * work.decode_context
        terms = self.mixed
        return (
            terms.of_tokens(work.prefill_tokens + work.decode_batch)
            + terms.batch_s * work.decode_batch
            + terms.context_s * work.decode_context
            + terms.context_product_s * work.prefill_context_product
            + terms.row_s * work.prefill_rows
        )

    def decode_line(self, batch: int) -> tuple[float, float]:
        """(a, b): a step in which only `batch` sequences decode takes a + b · Σ KV seconds."""
        terms, padded = self.decode, self.padded(batch)
        return terms.of_tokens(padded) + terms.batch_s * padded, terms.context_s

    def padded(self, batch: int) -> int:
        place = bisect_left(self.batches, batch)
        return self.batches[place] if place < len(self.batches) else batch

    def interval(self, work: StepWork, coverage: float = 0.8) -> Interval:
        """One step's time; wider the further it lies outside the fitted range."""
        terms, mid = self._terms(work), self.seconds(work)
        beyond = 1.0
        for name, value in _features(work).items():
            low, high = terms.ranges.get(name, (0.0, math.inf))
            if value > high:
                beyond *= value / max(high, 1.0)
            elif value < low:
                beyond *= low / max(value, 1.0)
        tail = (1 - coverage) / 2
        low_s, high_s = mid * quantile(terms.ratios, tail), mid * quantile(terms.ratios, 1 - tail)
        return Interval(min(mid, low_s) / beyond, mid, max(mid, high_s) * beyond, coverage)

    def out_of_range(self, work: StepWork) -> list[str]:
        """The features of this step outside the fitted range; empty: none."""
        ranges, found = self._terms(work).ranges, []
        for name, value in _features(work).items():
            low, high = ranges.get(name, (0.0, math.inf))
            if not low <= value <= high:
                found.append(f"{WORDS[name]}: {value:,.0f}, fitted from {low:,.0f} to {high:,.0f}")
        return found

    def scaled(self, factor: float) -> StepTimes:
        """The same machine, slower by `factor`: for the ends of an interval of whole runs."""
        return msgspec.structs.replace(
            self, decode=_scaled(self.decode, factor), mixed=_scaled(self.mixed, factor)
        )

    @property
    def spread(self) -> float:
        """The maximum relative error of a whole trace's time in four of five cases.

        From the n held-out traces: another trace falls below the k-th of their errors with probability k / (n
        + 1), so with few traces it is the largest. Each of a fit's traces contains steps that the others
        hardly have.
        """
        totals = sorted(abs(error.total) for error in self.errors)
        rank = min(len(totals), math.ceil(0.8 * (len(totals) + 1)))
        return totals[rank - 1] if totals else UNKNOWN_SPREAD

    @property
    def held_out_error(self) -> float | None:
        """The worst held-out trace: the larger of its step and total errors. None: none was held out."""
        return max((max(error.median, abs(error.total)) for error in self.errors), default=None)

    def _terms(self, work: StepWork) -> Terms:
        return self.mixed if work.prefill_tokens else self.decode

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> StepTimes:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise BadInput(f"{path}: no step times: {error}; fit them again") from error
        if found.version != VERSION:
            raise BadInput(f"{path}: written as version {found.version}, this is {VERSION}; fit it again")
        return found


def quantile(values: tuple[float, ...], share: float) -> float:
    """The value at `share` of evenly spaced quantiles."""
    place = min(max(share, 0.0), 1.0) * (len(values) - 1)
    below = min(int(place), len(values) - 1)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def _features(work: StepWork) -> dict[str, float]:
    """The features whose ranges are stored."""
    features: dict[str, float] = {
        "decode_batch": work.decode_batch,
        "decode_context": work.decode_context,
    }
    if work.prefill_tokens:
        features["tokens"] = work.prefill_tokens + work.decode_batch
        features["prefill_context_product"] = work.prefill_context_product
    return features


def _scaled(terms: Terms, factor: float) -> Terms:
    return msgspec.structs.replace(
        terms,
        fixed_s=factor * terms.fixed_s,
        token_s=tuple(factor * slope for slope in terms.token_s),
        batch_s=factor * terms.batch_s,
        context_s=factor * terms.context_s,
        context_product_s=factor * terms.context_product_s,
        row_s=factor * terms.row_s,
    )
