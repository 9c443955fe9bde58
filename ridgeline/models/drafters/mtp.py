"""MtpModule: MiMo's module for further tokens, with the methods of `Eagle3Head` that its drafter calls.

It joins the last hidden state behind a token with the embedding of the next one and passes them through one
layer of the model's shape; its output takes the place of the hidden state for the next guess. The embedding
and the LM head are the model's.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.models.drafters.mtp_config import MtpConfig
from ridgeline.models.drafters.rotation import rotated, rotation
from ridgeline.models.drafters.stored_tensors import read_tensor
from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.checkpoint_files import shard_paths, weights_file
from ridgeline.models.files.safetensors_file import SafetensorsFile

PREFIX = "model.mtp_layers.0."


class MtpModule(nn.Module):
    def __init__(self, config: MtpConfig, lm_head: Tensor) -> None:
        """lm_head [vocab, hidden]: the model's own"""
        super().__init__()
        self.config = config
        self._lm_head = lm_head
        attention, hidden = config.attention, config.hidden_size
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def linear(inside: int, outside: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inside, outside, bias=bias)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, eps=config.norm_eps)

        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = norm(), norm(), norm()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.input_proj = linear(2 * hidden, hidden)
        self.q_proj = linear(hidden, queries, attention.qkv_bias)
        self.k_proj = linear(hidden, keys, attention.qkv_bias)
        self.v_proj = linear(hidden, keys, attention.qkv_bias)
        self.o_proj = linear(queries, hidden, attention.output_bias)
        self.gate_proj, self.up_proj = linear(hidden, config.ffn_size), linear(hidden, config.ffn_size)
        self.down_proj = linear(config.ffn_size, hidden)

    def fused(self, taps: Tensor) -> Tensor:
        return taps

    def project(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual, and rotated q [..., H, D], k and v [..., K, D]. positions: [...]"""
        config, rope = self.config, self.config.attention.rope
        assert rope is not None
        embedded = torch.where(positions[..., None] == 0, 0.0, embedded)  # as in its training
        joined = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], -1)
        residual = self.input_proj(joined)
        x = self.input_layernorm(residual)
        shape = (*x.shape[:-1], -1, config.head_dim)
        q, k, v = (part(x).view(shape) for part in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = rotation(positions, config.head_dim, rope.theta)
        return residual, rotated(q, cos, sin), rotated(k, cos, sin), v

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """[..., H, D] → the hidden state that is read next"""
        x = residual + self.o_proj(attended.flatten(-2))
        normed = self.post_attention_layernorm(x)
        out: Tensor = x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        final: Tensor = self.final_layernorm(out)
        return final

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocab]"""
        return F.linear(hidden, self._lm_head.to(hidden.dtype))

    def tokens(self, ids: Tensor) -> Tensor:
        return ids


# The layer's parts have the names of the model's own; the others stand beside them.
_IN_LAYER = {
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}


def read_mtp(config: MtpConfig, lm_head: Tensor, dtype: torch.dtype) -> MtpModule:
    """Raises BrokenModel if a tensor is missing or has another shape."""
    module = MtpModule(config, lm_head)
    files = _files_of(config.path)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            part, _, kind = name.rpartition(".")
            stored = f"{PREFIX}{_IN_LAYER.get(part, part)}.{kind}"
            if stored not in files:
                raise BrokenModel(f"{config.path}: tensor {stored} is missing; it is one of --speculate mtp")
            parameter.copy_(read_tensor(files[stored], stored, tuple(parameter.shape)))
    return module.to(device=lm_head.device, dtype=dtype).requires_grad_(False)


def _files_of(path: Path) -> dict[str, SafetensorsFile]:
    """By tensor, the checkpoint's files."""
    found: dict[str, SafetensorsFile] = {}
    for shard in shard_paths(weights_file(path)):
        file = SafetensorsFile(shard)
        found |= dict.fromkeys(file.tensors, file)
    return found
