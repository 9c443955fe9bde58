"""StepCost: the cost of a replica's work in seconds, fitted to its Load lines.

Between two lines: seconds in steps = step · steps + running · output tokens + token · prompt tokens computed.
All four are the engine's own counters, taken together at the end of a step: neither the lines' times nor
their number matter. A least-squares fit with forgetting; with little data, the three costs keep the
proportions of PRIOR. Replicas of one model in one pool share a StepCost: their machines are the same.
"""

from __future__ import annotations

import numpy as np

from ridgeline.replica.messages import Load

DEFAULT_TOKEN_S = 1 / 2000
PRIOR = (50.0, 2.0, 1.0)  # costs of a step and of a running request, in prompt tokens
_LEAST_LINES = 8
_SOLVE_EVERY = 16
_FORGET = 0.998
_PRIOR_SHARE = 0.002
_LINE_S = 0.25  # a line with more seconds of steps weighs as much as one with these


class StepCost:
    def __init__(self) -> None:
        self.token_s = DEFAULT_TOKEN_S
        self.running_s = PRIOR[1] * DEFAULT_TOKEN_S
        self.step_s = PRIOR[0] * DEFAULT_TOKEN_S
        self.output_tokens = 128.0  # mean of an answer
        self.learned = False
        self._lines = 0
        self._products = [0.0] * 9  # ss sr st rr rt tt, and s, r, t times seconds

    def hear(self, before: Load, now: Load) -> bool:
        """Add two consecutive lines of one replica. Returns True if the costs have changed."""
        ended = now.ended - before.ended
        if ended > 0:
            mean = max((now.output_tokens - before.output_tokens) / ended, 1.0)
            self.output_tokens += min(0.02 * ended, 0.5) * (mean - self.output_tokens)
        seconds = now.busy_s - before.busy_s
        s, r = float(now.steps - before.steps), float(now.output_tokens - before.output_tokens)
        t = float(now.prefill_tokens - before.prefill_tokens)
        if s <= 0 or r < 0 or t < 0 or seconds <= 0:  # no step, or another engine
            return False
        share = min(1.0, _LINE_S / seconds)
        s, r, t, seconds = s * share, r * share, t * share, seconds * share
        rows = (s * s, s * r, s * t, r * r, r * t, t * t, s * seconds, r * seconds, t * seconds)
        self._products = [_FORGET * old + new for old, new in zip(self._products, rows, strict=True)]
        self._lines += 1
        return (self._lines == _LEAST_LINES or self._lines % _SOLVE_EVERY == 0) and self._solve()

    def _solve(self) -> bool:
        ss, sr, st, rr, rt, tt, sy, ry, ty = self._products
        squares = np.array([[ss, sr, st], [sr, rr, rt], [st, rt, tt]])
        # Two equations that fix only the proportions: PRIOR applies if the lines do not separate the costs.
        for weight, prior in ((ss, (1.0, 0.0, -PRIOR[0])), (rr, (0.0, 1.0, -PRIOR[1]))):
            squares += (_PRIOR_SHARE * weight + 1.0) * np.outer(prior, prior)
        try:
            found = np.linalg.solve(squares, np.array([sy, ry, ty]))
        except np.linalg.LinAlgError:
            return False
        step_s, running_s, token_s = (float(one) for one in found)
        if not np.isfinite(found).all() or token_s <= 0:
            return False
        self.token_s = token_s
        self.step_s = max(step_s, 0.0)
        # Never free, and never more than the cost of computing this number of prompt tokens again.
        self.running_s = min(max(running_s, 0.25 * token_s), 64 * token_s)
        self.learned = True
        return True
