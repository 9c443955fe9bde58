"""The fast twin of `ops.sampling`: the same token for the same row, seed and parameters, in less time.

A vocabulary is large and few tokens can win, so these are found first by comparing float32 logits; only they
are exponentiated, sorted and given noise. The filters and the race use the same double arithmetic as the
specification. Called by the engine's sampler, one row at a time.
"""

from __future__ import annotations

import functools
import math
import threading

import numpy as np

from ridgeline.ops import sampling
from ridgeline.ops.sampling import DoubleRow, FloatRow, IntRow

_GROUPS = 1024  # the vocabulary is split into this many groups; their maxima show where the best tokens are
_FIRST_RUNNERS = 64  # the best tokens race first; nearly always one of them wins
_NUCLEUS_TRIES = (64, 512)  # numbers of best tokens examined before all are sorted
_SLACK = 1e-6  # relative margin: where rounding could decide, a few more tokens are examined


def choose(
    logits: FloatRow, temperature: float, min_p: float, top_k: int, top_p: float, seed: int, position: int
) -> int:
    """draw(candidate_probs(logits, …), seed, position), for logits whose maximum is finite."""
    top = float(logits.max())
    tokens = _filter_cheaply(logits, top, temperature, min_p, top_k)
    if tokens is None and top_p == 1.0:
        return _race_of_all(logits, top, temperature, seed, position)
    if tokens is None:
        tokens, weights = _nucleus_of_all(logits, top, temperature, top_p)
    else:
        weights = _keep(_weights(logits[tokens], top, temperature), min_p, top_k)
        if top_p < 1.0:
            weights[weights < sampling.nucleus_threshold(weights, top_p)] = 0.0
    return int(tokens[_fastest(weights, tokens, seed, position)[0]])


def choose_among(
    tokens: IntRow,
    logits: FloatRow,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
) -> int:
    """Like `choose` from logits that are -inf except for these few tokens, in id order."""
    own = logits[tokens]
    weights = _keep(_weights(own, float(own.max()), temperature), min_p, top_k)
    if top_p < 1.0:
        weights[weights < sampling.nucleus_threshold(weights, top_p)] = 0.0
    return int(tokens[_fastest(weights, tokens, seed, position)[0]])


def top_tokens(logits: FloatRow, count: int) -> list[int]:
    """The `count` best ids, best first; equal logits in id order."""
    if count <= 0:
        return []
    among = best_candidates(logits, min(count, logits.size))
    order = np.lexsort((among, -logits[among]))[:count]
    chosen: list[int] = among[order].tolist()
    return chosen


def best_candidates(logits: FloatRow, count: int) -> IntRow:
    """Ids, in order, of the `count` best logits and of some that equal the last of them.

    Uses the count-th best of the groups' maxima: at least `count` logits reach it, so the count best all do.
    """
    size = logits.size // _GROUPS
    if size < 2 or count > _GROUPS // 2:
        return np.arange(logits.size)
    maxima = logits[: size * _GROUPS].reshape(size, _GROUPS).max(axis=0)
    threshold = np.partition(maxima, _GROUPS - count)[_GROUPS - count]
    return np.flatnonzero(logits >= threshold)


def _filter_cheaply(
    logits: FloatRow, top: float, temperature: float, min_p: float, top_k: int
) -> IntRow | None:
    """Ids of all tokens that min-p and top-k keep, and maybe a few more; None if neither is set."""
    tokens: IntRow | None = None
    if 0 < top_k < logits.size:
        tokens = best_candidates(logits, top_k)
    if min_p > 0.0:
        least = top + temperature * math.log(min_p)
        least -= _SLACK * max(1.0, abs(top), abs(least))
        tokens = np.flatnonzero(logits >= least) if tokens is None else tokens[logits[tokens] >= least]
    return tokens


def _weights(logits: FloatRow, top: float, temperature: float, out: DoubleRow | None = None) -> DoubleRow:
    """The same numbers as candidate_probs computes."""
    scaled: DoubleRow = np.subtract(logits, top, out=out, dtype=np.float64)
    scaled /= temperature
    weights: DoubleRow = np.exp(scaled, out=scaled)
    return weights


def _keep(weights: DoubleRow, min_p: float, top_k: int) -> DoubleRow:
    """The exact filters, on the tokens that the cheap ones kept."""
    if min_p > 0.0:
        weights[weights < min_p] = 0.0
    if 0 < top_k < weights.size:
        kth_best = np.partition(weights, weights.size - top_k)[weights.size - top_k]
        weights[weights < kth_best] = 0.0
    return weights


def _nucleus_of_all(
    logits: FloatRow, top: float, temperature: float, top_p: float
) -> tuple[IntRow, DoubleRow]:
    weights = _weights(logits, top, temperature, out=_scratch("weights", logits.size))
    wanted = top_p * float(weights.sum())
    for count in _NUCLEUS_TRIES:
        tokens = best_candidates(logits, count)
        best = weights[tokens]
        if float(best.sum()) >= wanted * (1.0 + _SLACK):
            break
    else:
        # All smaller tokens together weigh less than what the nucleus leaves out.
        tokens = np.flatnonzero(weights >= (1.0 - _SLACK) * (1.0 - top_p) * wanted / top_p / weights.size)
        best = weights[tokens]
    best[best < sampling.smallest_of_nucleus(best, wanted)] = 0.0
    return tokens, best


def _race_of_all(logits: FloatRow, top: float, temperature: float, seed: int, position: int) -> int:
    """A race of the whole vocabulary. The best tokens run first; of the others only those run whose noise is
    so small that the best of them, with it, would beat the leader.
    """
    first = best_candidates(logits, _FIRST_RUNNERS)
    weights = _weights(logits[first], top, temperature)
    place, lead = _fastest(weights, first, seed, position)
    leader = int(first[place])
    if first.size == logits.size:
        return leader
    others = _tokens_with_noise_below(float(weights.min()) / lead, seed, position, logits.size)
    if not others.size:
        return leader
    place, score = _fastest(_weights(logits[others], top, temperature), others, seed, position)
    challenger = int(others[place])
    # The first tokens may be among the others; of equal scores the specification takes the lower id.
    return challenger if (score, -challenger) > (lead, -leader) else leader


def _fastest(weights: DoubleRow, tokens: IntRow, seed: int, position: int) -> tuple[int, float]:
    """Position and score of the winner among these."""
    scores = weights / sampling.exponentials_at(seed, position, tokens)
    place = int(scores.argmax())
    return place, float(scores[place])


def _tokens_with_noise_below(noise: float, seed: int, position: int, vocab: int) -> IntRow:
    """All tokens whose exponential noise is below `noise`, and a few whose noise is slightly above it.

    The noise is -log of a uniform number made of the state's upper 53 bits, so small noise is a large state.
    The hash's last shift does not change the upper 31 bits: they decide, with one bit to spare.
    """
    least = max(0, int(math.exp(-noise) * 2.0**31) - 2) << 33
    state = _scratch("state", vocab).view(np.uint64)
    shifted = _scratch("shifted", vocab).view(np.uint64)
    np.add(_multiples_of_gamma(vocab), sampling.stream_start(seed, position), out=state)
    np.right_shift(state, np.uint64(30), out=shifted)
    state ^= shifted
    state *= sampling.MIX_1
    np.right_shift(state, np.uint64(27), out=shifted)
    state ^= shifted
    state *= sampling.MIX_2
    return np.flatnonzero(state >= np.uint64(least))


@functools.lru_cache(maxsize=4)
def _multiples_of_gamma(vocab: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.arange(vocab, dtype=np.uint64) * sampling.GAMMA


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], DoubleRow] = {}


_scratch_of_thread = _Scratch()


def _scratch(use: str, size: int) -> DoubleRow:
    """A scratch row of this thread for this purpose. Allocated once: the OS clears the pages of every new row
    of a vocabulary's size, which takes longer than the arithmetic.
    """
    row = _scratch_of_thread.rows.get((use, size))
    if row is None:
        row = _scratch_of_thread.rows[use, size] = np.empty(size)
    return row
