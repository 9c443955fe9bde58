"""The gate's checks: accuracy of a task and divergence on texts, each against the measured noise floor. Pure.

Accuracy. `lost` and `gained` are the flips. A loss within the margin passes (non-inferior: the 95 % interval
of the paired difference lies above −margin). Otherwise the candidate is worse if McNemar's p, adjusted for
the number of tasks (Holm), is below alpha and its net loss exceeds the net change of the reference against
itself. Neither: not shown.

Texts. The bound is the upper end of the reference's mean KL against itself, plus the margin. The candidate is
outside if the lower end of its mean KL is above the bound, within if the upper end is not. Neither: not
shown. Without common tokens, the loss per token stands in for KL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ridgeline.lab.evaluate.statistics.divergence import Divergence
from ridgeline.lab.evaluate.statistics.paired import (
    Flips,
    bootstrap_mean,
    flips_of,
    holm,
    mcnemar_exact,
    paired_differences,
)
from ridgeline.lab.evaluate.statistics.power import detectable_effect, items_needed

WORSE, OUTSIDE, NOT_SHOWN = "worse", "outside the noise floor", "not shown"
NON_INFERIOR, BETTER, WITHIN = "non-inferior", "better", "within the noise floor"
FAILING = (WORSE, OUTSIDE)


class AccuracyCheck(msgspec.Struct, frozen=True, tag="accuracy"):
    """All differences are candidate minus reference, as fractions."""

    task: str
    metric: str
    verdict: str
    reference: float
    candidate: float
    flips: Flips
    noise: Flips  # the reference against itself
    p: float  # McNemar, exact, two-sided
    adjusted_p: float
    low: float  # of the difference, by paired bootstrap
    high: float
    answers_changed: int  # also those right or wrong in both
    detectable: float  # the smallest loss that these items show with the stated power
    needed: int  # items for a loss of the margin

    @property
    def reason(self) -> str:
        flips = f"{len(self.flips.lost)} lost, {len(self.flips.gained)} gained of {self.flips.n}"
        points = f"{100 * self.flips.difference:+.2f} points [{100 * self.low:+.2f}, {100 * self.high:+.2f}]"
        return f"{points}; {flips}, p = {self.adjusted_p:.3g}; A/A {self.noise.net_loss:+d} net"


class TextCheck(msgspec.Struct, frozen=True, tag="text"):
    """without: why there is no divergence; then the loss per token is compared."""

    task: str
    verdict: str
    loss_change: float  # nats per token
    loss_error: float
    noise_loss_change: float
    noise_loss_error: float
    divergence: Divergence | None = None
    noise: Divergence | None = None
    without: str = ""
    worst: tuple[tuple[str, float], ...] = ()  # texts by mean KL (or loss), the largest first

    @property
    def reason(self) -> str:
        if self.divergence is None or self.noise is None:
            return (
                f"loss {self.loss_change:+.5f} ± {self.loss_error:.5f} nats per token; "
                f"A/A {self.noise_loss_change:+.5f} ± {self.noise_loss_error:.5f}; no KL: {self.without}"
            )
        return (
            f"mean KL {self.divergence.mean_kl:.6f} ± {self.divergence.kl_error:.6f} nats, same top token "
            f"{100 * self.divergence.same_top:.2f} %; "
            f"A/A {self.noise.mean_kl:.6f} ± {self.noise.kl_error:.6f}"
        )


Check = AccuracyCheck | TextCheck
Values = Mapping[str, float]  # by item id


class TaskValues(msgspec.Struct, frozen=True):
    """One task's outcomes under reference, reference again and candidate."""

    task: str
    metric: str
    reference: dict[str, float]
    again: dict[str, float]
    candidate: dict[str, float]
    answers_changed: int = 0


def accuracy_checks(
    tasks: Sequence[TaskValues], *, margin: float, alpha: float, power: float, seed: int
) -> list[AccuracyCheck]:
    """margin: a fraction. The p-values of all tasks are adjusted together."""
    flips = [flips_of(task.reference, task.candidate) for task in tasks]
    p_values = [mcnemar_exact(len(flip.lost), len(flip.gained)) for flip in flips]
    return [
        _accuracy_check(task, flip, p, adjusted, margin, alpha, power, seed)
        for task, flip, p, adjusted in zip(tasks, flips, p_values, holm(p_values), strict=True)
    ]


def _accuracy_check(
    task: TaskValues,
    flips: Flips,
    p: float,
    adjusted: float,
    margin: float,
    alpha: float,
    power: float,
    seed: int,
) -> AccuracyCheck:
    noise = flips_of(task.reference, task.again)
    low, high = bootstrap_mean(paired_differences(task.reference, task.candidate), 0.95, seed)
    rate = max(flips.rate, 1 / max(flips.n, 1))  # no flip seen: at most about one in n
    return AccuracyCheck(
        task=task.task,
        metric=task.metric,
        verdict=_accuracy_verdict(flips, noise, adjusted, low, margin, alpha),
        reference=_mean(task.reference),
        candidate=_mean(task.candidate),
        flips=flips,
        noise=noise,
        p=p,
        adjusted_p=adjusted,
        low=low,
        high=high,
        answers_changed=task.answers_changed,
        detectable=detectable_effect(flips.n, rate, alpha, power),
        needed=items_needed(margin, rate, alpha, power) if margin > 0 else 0,
    )


def _accuracy_verdict(
    flips: Flips, noise: Flips, adjusted_p: float, low: float, margin: float, alpha: float
) -> str:
    # Without a loss the bootstrap sees none: n items without one bound its rate at about 3/n.
    surely_above = low if flips.lost else min(low, -3 / max(flips.n, 1))
    if margin > 0 and surely_above > -margin:
        return NON_INFERIOR
    significant = adjusted_p < alpha and abs(flips.net_loss) > abs(noise.net_loss)
    if significant:
        return WORSE if flips.net_loss > 0 else BETTER
    return NOT_SHOWN


def text_verdict(low: float, high: float, noise_high: float, margin: float) -> str:
    """low, high: of the candidate against the reference; noise_high: of the reference against itself."""
    if low > noise_high + margin:
        return OUTSIDE
    return NOT_SHOWN if high > noise_high + margin else WITHIN


def _mean(values: Values) -> float:
    return sum(values.values()) / len(values) if values else 0.0
