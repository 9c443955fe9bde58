"""How far a candidate's next-token distributions are from the reference's, from the top tokens of both.

Each position has the log-probabilities of the most likely tokens; all others are one tail. A token that only
the reference names has at most the probability of the candidate's last named one. KL with that probability,
plus the rest as one bucket, is a lower bound of the exact divergence. Pure; the log-probabilities are the
subjects' own, with a float32 log-sum-exp over the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.lab.errors import LabError

Floats = npt.NDArray[np.float64]
Z95 = 1.959964
LEAST_MASS = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """One text under one subject: its tokens, their log-probabilities, and the top tokens at each."""

    tokens: npt.NDArray[np.int64]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    top_ids: npt.NDArray[np.int64]  # [T, K]; -1: fewer than K are known
    top_logprobs: npt.NDArray[np.float32]  # [T, K]
    prefix: int = -1  # the token before the text; -1: none, and the text's first word is not scored


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Of every position of one text: the divergence and its parts."""

    kl: Floats
    same_top: npt.NDArray[np.bool_]
    delta_p: Floats  # of the text's own token: candidate minus reference
    delta_logprob: Floats
    tail: Floats  # the reference's mass outside its top tokens


class Divergence(msgspec.Struct, frozen=True):
    """Over all positions of all texts. Errors are over texts: the positions of one are correlated."""

    positions: int
    texts: int
    mean_kl: float
    kl_error: float
    kl_p99: float
    kl_p999: float
    same_top: float
    same_top_error: float
    rms_delta_p: float
    delta_ppl: float  # perplexity per token: candidate minus reference
    delta_ppl_error: float
    ppl_ratio: float
    reference_ppl: float
    mean_tail: float

    @property
    def kl_high(self) -> float:
        return self.mean_kl + Z95 * self.kl_error

    @property
    def kl_low(self) -> float:
        return self.mean_kl - Z95 * self.kl_error


class NotAligned(Exception):
    """The subjects see a text as different tokens: their distributions do not compare."""


def refuse_other_tokens(reference: TokenScores, candidate: TokenScores) -> None:
    """NotAligned unless both have the same tokens after the same prefix."""
    if not np.array_equal(reference.tokens, candidate.tokens):
        raise NotAligned("the subjects cut the text into different tokens")
    if reference.prefix != candidate.prefix:
        raise NotAligned("the subjects have different tokens before the text")


def positions_of(reference: TokenScores, candidate: TokenScores) -> Positions:
    """KL(reference ‖ candidate) at every position, over the reference's top tokens and the tail.

    A log-probability that is not finite is a LabError.
    """
    refuse_other_tokens(reference, candidate)
    _refuse_not_finite(reference)
    _refuse_not_finite(candidate)
    n = len(reference.tokens)
    kl, tail = np.empty(n), np.empty(n)
    for place in range(n):
        kl[place], tail[place] = _kl(
            reference.top_ids[place],
            reference.top_logprobs[place],
            candidate.top_ids[place],
            candidate.top_logprobs[place],
        )
    own, other = reference.logprobs.astype(np.float64), candidate.logprobs.astype(np.float64)
    return Positions(
        kl,
        reference.top_ids[:, 0] == candidate.top_ids[:, 0],
        np.exp(other) - np.exp(own),
        other - own,
        tail,
    )


def _kl(
    ids: npt.NDArray[np.int64],
    logprobs: npt.NDArray[np.float32],
    other_ids: npt.NDArray[np.int64],
    other_logprobs: npt.NDArray[np.float32],
) -> tuple[float, float]:
    """(the larger of two lower bounds, the reference's mass outside its top tokens)."""
    own, other = logprobs[ids >= 0].astype(np.float64), other_logprobs[other_ids >= 0].astype(np.float64)
    _, places, other_places = np.intersect1d(
        ids[ids >= 0], other_ids[other_ids >= 0], assume_unique=True, return_indices=True
    )
    is_common = np.zeros(len(own), np.bool_)
    is_common[places] = True
    p = np.exp(own)
    common = float((p[places] * (own[places] - other[other_places])).sum())
    most_q = float(other.min()) if len(other) else 0.0  # of a token that the candidate does not name
    unnamed = float((p[~is_common] * (own[~is_common] - most_q)).sum())
    q_rest = _rest(np.exp(other[other_places]))
    p_not_common = _rest(p[places])
    p_rest = max(p_not_common - float(p[~is_common].sum()), LEAST_MASS)
    by_token = common + unnamed + p_rest * math.log(p_rest / q_rest)
    in_one_bucket = common + p_not_common * math.log(p_not_common / q_rest)
    return max(0.0, by_token, in_one_bucket), p_rest


def _rest(masses: Floats) -> float:
    return max(1.0 - float(masses.sum()), LEAST_MASS)


def _refuse_not_finite(scores: TokenScores) -> None:
    if not (
        np.isfinite(scores.logprobs).all() and np.isfinite(scores.top_logprobs[scores.top_ids >= 0]).all()
    ):
        raise LabError("a subject's log-probabilities are not all finite numbers")


def divergence_of(texts: list[Positions], reference_logprobs: list[Floats]) -> Divergence:
    """One summary. reference_logprobs: of each text's own tokens, for the perplexity."""
    kl = np.concatenate([text.kl for text in texts])
    delta_p = np.concatenate([text.delta_p for text in texts])
    lengths = np.array([len(text.kl) for text in texts], dtype=np.float64)
    mean_kl, kl_error = clustered_mean(np.array([text.kl.sum() for text in texts]), lengths)
    same, same_error = clustered_mean(np.array([text.same_top.sum() for text in texts], np.float64), lengths)
    delta, delta_error = clustered_mean(np.array([-text.delta_logprob.sum() for text in texts]), lengths)
    loss = -float(np.concatenate(reference_logprobs).mean())
    ppl = math.exp(loss)
    return Divergence(
        positions=len(kl),
        texts=len(texts),
        mean_kl=mean_kl,
        kl_error=kl_error,
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_p999=float(np.quantile(kl, 0.999)),
        same_top=same,
        same_top_error=same_error,
        rms_delta_p=float(np.sqrt((delta_p**2).mean())),
        delta_ppl=ppl * math.expm1(delta),
        delta_ppl_error=ppl * math.exp(delta) * delta_error,
        ppl_ratio=math.exp(delta),
        reference_ppl=ppl,
        mean_tail=float(np.concatenate([text.tail for text in texts]).mean()),
    )


def clustered_mean(sums: Floats, lengths: Floats) -> tuple[float, float]:
    """Mean per position and its error with texts as clusters; one text alone gives no error."""
    mean = float(sums.sum() / lengths.sum())
    n = len(sums)
    if n < 2:
        return mean, 0.0
    residuals = float(((sums - mean * lengths) ** 2).sum())
    return mean, math.sqrt(residuals * n / (n - 1)) / float(lengths.sum())
