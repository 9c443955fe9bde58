"""DeviceSampler: a step's samples chosen on the device, and fetched when the step is collected.

Used by the CUDA runner. Only token ids, and log-probabilities where asked for, cross to the host. Parameters
live in the sequence's device row; `ops.cuda.sampling` holds the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.request import Sequence
from ridgeline.engine.step import Sampled, TokenLogprob
from ridgeline.ops.cuda.sampling import sample, sample_scratch
from ridgeline.ops.cuda.sampling_state import RowParams, SamplePlan, SamplerState

_TURNS = 4  # results in turn: more than steps that can be in flight
NOT_FINITE = "sampling failed: the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class Pick:
    """A sample to take: the device row of its sequence, and how many tokens that had before."""

    row: int
    seq: Sequence
    position: int


class DeviceSampler:
    def __init__(
        self, eos_ids: tuple[int, ...], vocab: int, num_rows: int, most_picks: int, device: torch.device
    ) -> None:
        self._eos_ids = eos_ids
        self._state = SamplerState(num_rows, vocab, device)
        self._scratch = sample_scratch(most_picks, device)
        on_gpu = device.type == "cuda"
        self._tokens = torch.zeros(_TURNS, most_picks, dtype=torch.int32, device=device)
        self._fetched = torch.zeros(_TURNS, most_picks, dtype=torch.int32, pin_memory=on_gpu)
        self._turn = 0

    def set_row(self, row: int, seq: Sequence) -> None:
        """A sequence moves into a row; what it has of output was chosen before a preemption."""
        self._state.set_row(row, self._row_params(seq), seq.tokens[: seq.prompt_len], seq.tokens[seq.prompt_len :])

    def clear_row(self, row: int) -> None:
        self._state.clear_row(row)

    def flush(self) -> None:
        """Send the rows' changed parameters. Before the step's own launches."""
        self._state.flush()

    def sample(
        self, logits: Tensor, picks: list[Pick], rows: Tensor, positions: Tensor, last_tokens: Tensor
    ) -> SampleTicket:
        """Launch the choice of a token per row of logits. `rows`, `positions`: the picks', on the device."""
        turn = self._turn = (self._turn + 1) % _TURNS
        count = len(picks)
        tokens, fetched = self._tokens[turn, :count], self._fetched[turn, :count]
        plan = self._state.plan([pick.row for pick in picks], [pick.position for pick in picks])
        found = sample(logits, rows, positions, self._state, last_tokens, tokens, self._scratch, plan)
        fetched.copy_(tokens, non_blocking=True)
        return SampleTicket(picks, fetched, found, _record(logits.device))

    def _row_params(self, seq: Sequence) -> RowParams:
        params = seq.params
        return RowParams(
            seed=seq.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens,
            suppressed=params.stop_token_ids + (() if params.ignore_eos else self._eos_ids),
            bias=params.logit_bias,
            logprobs=params.logprobs,
        )


@dataclass(frozen=True, slots=True)
class SampleTicket:
    """Samples on their way from the device."""

    picks: list[Pick]
    tokens: Tensor  # on the host, when `done`
    logprobs: Any
    done: torch.cuda.Event | None

    def collect(self) -> list[Sampled]:
        """Wait for the step, and give one Sampled per pick."""
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return [Sampled(token) if token >= 0 else Sampled(-1, error=NOT_FINITE) for token in tokens]


def _record(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
