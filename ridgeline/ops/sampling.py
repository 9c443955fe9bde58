"""Sampling a token from logits: the specification, in numpy, one row at a time.

The order is fixed: bias, penalties, suppressed ids, temperature, min-p, top-k, top-p, draw. A draw depends
only on the row's logits, (seed, position) and the parameters, never on the rest of the batch. A batched or
device twin must choose the same token wherever the float arithmetic leaves no tie; the engine's sampler uses
`sampling_fast`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

FloatRow = np.ndarray[Any, np.dtype[np.float32]]
DoubleRow = np.ndarray[Any, np.dtype[np.float64]]
IntRow = np.ndarray[Any, np.dtype[np.int64]]

_MASK64 = (1 << 64) - 1
GAMMA, MIX_1, MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def add_bias(logits: FloatRow, bias: Mapping[int, float]) -> None:
    """logits[V] += bias, in place. An id outside the vocabulary is an IndexError."""
    for token, value in bias.items():
        logits[token] += value


def apply_penalties(
    logits: FloatRow,
    prompt: IntRow,
    output: IntRow,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """In place. Repetition counts prompt and output; presence and frequency only the output.

    repetition r: a seen token's logit is divided by r when positive, multiplied by r when negative.
    presence p:   minus p once for every token of the output.
    frequency f:  minus f for each time it occurs in the output.
    """
    if repetition != 1.0:
        seen = np.unique(np.concatenate([prompt, output]))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / repetition, values * repetition)
    if (presence or frequency) and output.size:
        tokens, counts = np.unique(output, return_counts=True)
        logits[tokens] -= presence + frequency * counts.astype(np.float32)


def suppress(logits: FloatRow, tokens: Iterable[int]) -> None:
    """Exclude these ids (end tokens before min_tokens), in place."""
    for token in tokens:
        logits[token] = -np.inf


def candidate_probs(
    logits: FloatRow, temperature: float, min_p: float, top_k: int, top_p: float
) -> DoubleRow:
    """Probabilities [V] in token order after temperature and filters; unnormalised, zero where filtered out.

    min-p keeps tokens at least min_p times as likely as the best; top-k the k best (all ties with the k-th
    stay); top-p the smallest set of best tokens whose share of what min-p and top-k left reaches top_p.
    """
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= temperature
    probs: DoubleRow = np.exp(scaled)
    if min_p > 0.0:
        probs[probs < min_p] = 0.0  # the best token's weight is exactly 1
    if 0 < top_k < probs.size:
        kth_best = np.partition(probs, probs.size - top_k)[probs.size - top_k]
        probs[probs < kth_best] = 0.0
    if top_p < 1.0:
        probs[probs < nucleus_threshold(probs, top_p)] = 0.0
    return probs


def nucleus_threshold(probs: DoubleRow, top_p: float) -> float:
    """The smallest weight that still belongs to the nucleus."""
    left = probs[probs > 0.0]
    return smallest_of_nucleus(left, top_p * float(left.sum()))


def smallest_of_nucleus(weights: DoubleRow, wanted: float) -> float:
    """The last of the largest weights that together reach `wanted`."""
    ordered = np.sort(weights)[::-1]
    last = int(np.searchsorted(np.cumsum(ordered), wanted, side="left"))
    return float(ordered[min(last, ordered.size - 1)])


def draw(probs: DoubleRow, seed: int, position: int) -> int:
    """Draw a token in proportion to its weight, by an exponential race: the first token to finish wins.

    token = argmax of probs / noise. A change in the last bits of a weight changes the result only if two
    tokens are that close, and never through the weights of others. (Looking up one random number in the
    cumulative weights would: all the tiny tokens of a tail move when anything before them does.)
    """
    possible = np.flatnonzero(probs)
    return int(possible[np.argmax(probs[possible] / exponentials_at(seed, position, possible))])


def exponentials_at(seed: int, position: int, tokens: IntRow) -> DoubleRow:
    """Exp(1) noise of these tokens at output position `position` of stream `seed`.

    Counter-based: SplitMix64 over (seed, position, token). There is no state between draws, so any one can be
    repeated without replaying those before it.
    """
    state = tokens.astype(np.uint64) * GAMMA + stream_start(seed, position)
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    state ^= state >> np.uint64(31)
    uniform = ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0 or 1
    noise: DoubleRow = -np.log(uniform)
    return noise


def stream_start(seed: int, position: int) -> np.uint64:
    """The start of the counter for the noise of output position `position` of stream `seed`."""
    return np.uint64(mix64(mix64(seed) + position))


def mix64(value: int) -> int:
    """SplitMix64's output function on one number."""
    value = (value + int(GAMMA)) & _MASK64
    value = ((value ^ (value >> 30)) * int(MIX_1)) & _MASK64
    value = ((value ^ (value >> 27)) * int(MIX_2)) & _MASK64
    return value ^ (value >> 31)


def log_normalizer(logits: FloatRow) -> float:
    """log Σ exp(logits): subtract it from a logit to get the log-probability."""
    top = float(logits.max())
    return top + float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))


def top_tokens(logits: FloatRow, count: int) -> list[int]:
    """The `count` best ids, best first; equal logits in id order."""
    if count <= 0:
        return []
    count = min(count, logits.size)
    kth_best = np.partition(logits, logits.size - count)[logits.size - count]
    among = np.flatnonzero(logits >= kth_best)
    order = np.lexsort((among, -logits[among]))
    return [int(token) for token in among[order][:count]]
