"""Target: the model whose answers are learned, as a plain forward pass over sequences of one padded length.

The reference decoder over ops whose attention keeps keys and values in the step: every family that the
reference computes, on any device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.lab.errors import LabError
from ridgeline.models.decoders.reference import Decoder
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.torch_weights import load_weights
from ridgeline.ops import torch_backend
from ridgeline.ops.backend import Backend
from ridgeline.ops.inputs import StepInputs


class Seen(NamedTuple):
    """Of a batch [B, T]."""

    taps: Tensor  # [B, T, taps · hidden]
    logits: Tensor  # [B, T, vocab] float32


class WholeSequences:
    """The torch ops, with attention over B sequences of T tokens from their first one."""

    NAME = "torch"

    def __init__(self, length: int) -> None:
        self._length = length
        self._kv: tuple[Tensor, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_backend, name)

    def plan_attention(self, inputs: StepInputs, window: int | None, chunked: bool = False) -> int | None:
        if chunked:
            raise LabError("train-drafter does not compute chunked attention")
        return window

    def write_kv(self, keys: Tensor, values: Tensor, kv: Tensor, slots: Tensor) -> None:
        self._kv = keys, values

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        plan: int | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if softcap is not None or sinks is not None:
            raise LabError("train-drafter does not compute attention with soft caps or sinks")
        assert self._kv is not None
        q4, k4, v4 = (part.view(-1, self._length, *part.shape[1:]).transpose(1, 2) for part in (q, *self._kv))
        mask = None
        if plan is not None and plan < self._length:
            place = torch.arange(self._length, device=q.device)
            behind = place[:, None] - place
            mask = (behind >= 0) & (behind < plan)
        grouped = q4.shape[1] != k4.shape[1]
        out = F.scaled_dot_product_attention(
            q4, k4, v4, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).reshape(q.shape)


class Target:
    def __init__(
        self, path: Path, spec: ModelSpec, device: torch.device, taps: tuple[int, ...], length: int
    ) -> None:
        self.spec, self.device = spec, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        weights = load_weights(path, spec, self.dtype, device=device)
        self.decoder = Decoder(spec, weights, torch_backend, length)
        self.decoder.taps = taps

    @property
    def embed(self) -> Tensor:
        return self.decoder.weights.embed

    @torch.no_grad()
    def see(self, tokens: Tensor) -> Seen:
        """tokens [B, T] int64, on the device"""
        batch, length = tokens.shape
        self.decoder.use(cast(Backend, WholeSequences(length)))
        nothing = tokens.new_zeros(1)
        inputs = StepInputs(
            token_ids=tokens.flatten(),
            positions=torch.arange(length, device=self.device).repeat(batch),
            slots=nothing,
            query_starts=nothing,
            context_lens=nothing,
            block_tables=nothing,
            logit_rows=torch.arange(batch * length, device=self.device),
            block_size=1,
        )
        logits = self.decoder.forward(inputs, [nothing] * self.spec.num_layers)
        assert self.decoder.tapped is not None
        return Seen(self.decoder.tapped.view(batch, length, -1), logits.view(batch, length, -1))
