"""DraftingTimes: predicts what a drafter that computes takes: a pass over rows, and reading tokens.

A pass over rows is measured like a step of as many decodes, and tokens that are read together like one of as
many tokens. Reading is measured apart: it is no part of what a draft costs.
"""

from __future__ import annotations

from ridgeline.engine.speculate.step_times import StepTimes

READING_SHARE = 0.5  # of the time of a plain step, for the tokens that are read before one
READING_SIZES = (512, 256, 128, 64, 32, 16)  # tokens that are read before one step
DISTURBED = 4.0  # times as long as expected: counts as this much and no more


class DraftingTimes:
    def __init__(self) -> None:
        self._passes = StepTimes()
        self._readings = StepTimes()

    def expect_slope(self, slope: float) -> None:
        """Until it is measured: the time of each further row or token, as a share of the first one's."""
        self._passes.prior_slope = self._readings.prior_slope = slope

    def pass_s(self, rows: int, context: int) -> float | None:
        """context: KV tokens of the rows. None: not measured yet."""
        return self._passes.seconds(rows, context)

    def note_draft(self, rows: int, context: int, passes: int, seconds: float) -> float:
        """Returns the time that counts."""
        expected = self.pass_s(rows, context)
        self._passes.observe(rows, context, seconds / passes)
        return seconds if expected is None else min(seconds, DISTURBED * passes * expected)

    def note_reading(self, tokens: int, seconds: float) -> None:
        self._readings.observe(tokens, 0, seconds)

    def reading_size(self, plain_s: float) -> int:
        """Tokens to read before a step that takes plain_s without."""
        for size in READING_SIZES:
            known = self._part_s(size)
            if known is not None and known <= READING_SHARE * plain_s:
                return size
        return READING_SIZES[-1]

    def reading_s(self, tokens: int, plain_s: float) -> float:
        """The time of reading `tokens` tokens, in parts. Before anything was measured: of a first part."""
        size = self.reading_size(plain_s)
        whole, rest = divmod(tokens, size)
        each, last = self._part_s(size), self._part_s(max(rest, 1))
        if each is None or last is None:
            return plain_s
        return whole * each + (last if rest else 0.0)

    def _part_s(self, tokens: int) -> float | None:
        """Before it was measured, as a pass over as many rows."""
        known = self._readings.seconds(tokens, 0)
        return self._passes.seconds(tokens, 0) if known is None else known
