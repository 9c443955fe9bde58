"""HostSampler: turns logits into tokens on the host, each row on its own so that an error affects only it.

Called by the runner after the forward pass, except when the backend finds the best tokens itself and no row
needs more. Rows that need only the best token share one batched argmax.
Log-probabilities are the model's own (before bias, penalties and temperature).
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from ridgeline.engine.grammar.masks import (
    IntRow,
    Mask,
    NoToken,
    allows,
    few_allowed,
    mask_words,
    masked,
)
from ridgeline.engine.run.sequence_mask import continues, fill_mask
from ridgeline.engine.schedule.request import SamplingParams, Sequence
from ridgeline.engine.schedule.step import Sampled, TokenLogprob
from ridgeline.ops import sampling, sampling_fast

log = logging.getLogger(__name__)

Logits = np.ndarray[Any, np.dtype[np.float32]]
FloatRow = np.ndarray[Any, np.dtype[np.float32]]


class HostSampler:
    def __init__(self, eos_ids: tuple[int, ...]) -> None:
        self._eos_ids = eos_ids
        self._mask: Mask = np.zeros(0, np.int32)

    def sample(self, logits: Logits, picks: list[tuple[int, Sequence]]) -> list[Sampled]:
        """One Sampled per pick (row of logits [L, V], sequence), in order. Logits are not changed or kept."""
        rows = [row for row, seq in picks if wants_best_token(seq)]
        best = _best_tokens(logits, rows)
        return [
            Sampled(best[row])
            if wants_best_token(seq) and row in best
            else self._sample_alone(logits[row], seq)
            for row, seq in picks
        ]

    def verify(self, logits: Logits, seq: Sequence, drafts: tuple[int, ...]) -> list[Sampled]:
        """The tokens that `seq` draws one after the other, up to the first one that is not the draft.

        Row i of logits [1 + drafts, V] follows the first i drafts. Each token is drawn as if it were alone in
        its step: with its own random numbers, and with penalties, grammar and budget advanced over the drafts
        before it, which are the tokens that were drawn there.
        """
        if wants_best_token(seq) and seq.thinking is None:
            best = _best_tokens(logits, list(range(len(logits))))
            return self._best_until_wrong(best, logits, seq, drafts)
        ahead, samples = seq.ahead(), [self._sample_alone(logits[0], seq)]
        for place, draft in enumerate(drafts):
            last = samples[-1]
            if last.error is not None or last.token != draft or not continues(ahead, draft):
                break
            samples.append(self._sample_alone(logits[place + 1], ahead))
        return samples

    def _best_until_wrong(
        self, best: dict[int, int], logits: Logits, seq: Sequence, drafts: tuple[int, ...]
    ) -> list[Sampled]:
        samples: list[Sampled] = []
        for place, row in enumerate(logits):
            drawn = Sampled(best[place]) if place in best else self._sample_alone(row, seq)
            samples.append(drawn)
            if place == len(drafts) or drawn.token != drafts[place] or drawn.token in seq.end_ids:
                break
        return samples

    def prompt_logprobs(self, logits: Logits, targets: list[int], count: int) -> list[TokenLogprob]:
        """The log-probability of each target given its prefix; row i of logits predicts targets[i]."""
        return [logprob_of(row, token, count) for row, token in zip(logits, targets, strict=True)]

    def _sample_alone(self, row: FloatRow, seq: Sequence) -> Sampled:
        try:
            return self._choose(row, seq)
        except NoToken as reason:
            return Sampled(-1, error=str(reason))
        except Exception as error:
            log.exception("sampling failed for %s; ending only this sequence", seq.name)
            return Sampled(-1, error=f"sampling failed: {type(error).__name__}: {error}")

    def _choose(self, row: FloatRow, seq: Sequence) -> Sampled:
        params = seq.params
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            raise FloatingPointError("the model's logits are not finite")
        forced = seq.forced_token
        logits = row if forced is not None else self._processed(row, seq)
        if forced is not None:
            token = forced
        elif seq.matcher is not None:
            token = self._pick_allowed(logits, seq, best if logits is row else int(logits.argmax()))
        elif params.greedy and logits is row:
            token = best
        else:
            token = _pick(logits, seq)
        if params.logprobs is None:
            return Sampled(token)
        return Sampled(token, logprob_of(row, token, params.logprobs))

    def _pick_allowed(self, logits: FloatRow, seq: Sequence, best: int) -> int:
        """Sample among the tokens that the grammar allows. best: the best token of these logits."""
        params = seq.params
        assert seq.matcher is not None
        # The best token is nearly always allowed: check it alone first.
        if (
            params.greedy
            and best not in seq.end_ids
            and best not in self._eos_ids
            and seq.matcher.permits(best)
        ):
            return best
        if self._mask.size != mask_words(logits.size):
            self._mask = np.zeros(mask_words(logits.size), np.int32)
        fill_mask(seq, self._mask)
        # A token that wins among all tokens also wins among the allowed ones.
        if params.greedy and allows(self._mask, best):
            return best
        tokens = few_allowed(self._mask)
        if tokens is not None:
            return _pick_among(tokens, logits, seq)
        if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0 and not params.greedy:
            token = _pick(logits, seq)
            if allows(self._mask, token):
                return token
        return _pick(masked(logits, self._mask), seq)

    def _processed(self, row: FloatRow, seq: Sequence) -> Any:
        """A changed copy of the row, or the row itself if no change is requested."""
        params = seq.params
        too_short = seq.num_output < params.min_tokens and seq.matcher is None  # else the mask enforces it
        if not (params.logit_bias or params.needs_penalties or too_short):
            return row
        logits = row.copy()
        sampling.add_bias(logits, params.logit_bias)
        if params.needs_penalties:
            tokens = np.asarray(seq.tokens, dtype=np.int64)
            sampling.apply_penalties(
                logits,
                tokens[: seq.prompt_len],
                tokens[seq.prompt_len :],
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
        if too_short:
            sampling.suppress(logits, self._end_ids(params))
        return logits

    def _end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return params.stop_token_ids + (() if params.ignore_eos else self._eos_ids)


def wants_best_token(seq: Sequence) -> bool:
    """Whether the next token is the best of the logits, and nothing else is needed."""
    return len(seq.tokens) >= seq.argmax_from and (seq.thinking is None or seq.thinking.forced is None)


def _pick(logits: FloatRow, seq: Sequence) -> int:
    params = seq.params
    if params.greedy:
        return int(logits.argmax())
    return sampling_fast.choose(
        logits, params.temperature, params.min_p, params.top_k, params.top_p, seq.seed, seq.num_output
    )


def _pick_among(tokens: IntRow, logits: FloatRow, seq: Sequence) -> int:
    """`_pick` restricted to these tokens."""
    params = seq.params
    if params.greedy:
        return int(tokens[logits[tokens].argmax()])
    return sampling_fast.choose_among(
        tokens,
        logits,
        params.temperature,
        params.min_p,
        params.top_k,
        params.top_p,
        seq.seed,
        seq.num_output,
    )


def _best_tokens(logits: Logits, rows: list[int]) -> dict[int, int]:
    """The best token of each row; rows whose maximum is NaN are left out."""
    if not rows:
        return {}
    if rows == list(range(rows[0], rows[0] + len(rows))):  # nearly always: avoids a copy
        best = logits[rows[0] : rows[0] + len(rows)].argmax(axis=1)
    else:
        best = np.array([logits[row].argmax() for row in rows])
    finite = np.isfinite(logits[rows, best])
    if finite.all():
        return dict(zip(rows, best.tolist(), strict=True))
    return {row: token for row, token, ok in zip(rows, best.tolist(), finite, strict=True) if ok}


def logprob_of(row: FloatRow, token: int, count: int) -> TokenLogprob:
    """The token's log-probability and rank, with the `count` best alternatives."""
    norm = sampling.log_normalizer(row)
    rank = int((row > row[token]).sum()) + 1
    top = [(other, float(row[other]) - norm) for other in sampling_fast.top_tokens(row, count)]
    return TokenLogprob(token, float(row[token]) - norm, rank, top)
