"""Eagle3Head: the draft head's arithmetic, shared by its training and by its drafter.

A position's input is the hidden state behind a token and the embedding of the next one; its output is a
hidden state for the position after, and logits over the draft vocabulary. Its own outputs take the place of
the target's states where the target has not computed any yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.models.drafters.eagle3_config import CONFIG, WEIGHTS, Eagle3Config, read_config
from ridgeline.models.drafters.rotation import rotated, rotation
from ridgeline.models.drafters.stored_tensors import DTYPES, read_tensor
from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.safetensors_file import SafetensorsFile
from ridgeline.models.files.safetensors_writer import write_safetensors

_LAYER = "layers.0."
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Eagle3Head(nn.Module):
    """draft_ids [draft vocab]: the target's id of each draft token, ascending."""

    draft_ids: Tensor

    def __init__(self, config: Eagle3Config, draft_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        hidden, wide = config.hidden_size, 2 * config.hidden_size
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def linear(inside: int, outside: int) -> nn.Linear:
            return nn.Linear(inside, outside, bias=False)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, eps=config.norm_eps)

        self.fc = linear(len(config.taps) * hidden, hidden)
        self.input_layernorm, self.hidden_norm = norm(), norm()
        self.q_proj, self.k_proj, self.v_proj = linear(wide, queries), linear(wide, keys), linear(wide, keys)
        self.o_proj = linear(queries, hidden)
        self.post_attention_layernorm, self.norm = norm(), norm()
        self.gate_proj, self.up_proj = linear(hidden, config.ffn_size), linear(hidden, config.ffn_size)
        self.down_proj = linear(config.ffn_size, hidden)
        self.lm_head = linear(hidden, config.draft_vocab_size)
        self.register_buffer("draft_ids", draft_ids.to(torch.int64), persistent=False)

    def fused(self, taps: Tensor) -> Tensor:
        """[..., taps · hidden] of the target → [..., hidden]"""
        fused: Tensor = self.fc(taps)
        return fused

    def project(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual, and rotated q [..., H, D], k and v [..., K, D]. positions: [...]"""
        config = self.config
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        shape = (*x.shape[:-1], -1, config.head_dim)
        q, k, v = (part(x).view(shape) for part in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = rotation(positions, config.head_dim, config.rope_theta)
        residual = normed if config.norm_before_residual else hidden
        return residual, rotated(q, cos, sin), rotated(k, cos, sin), v

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """[..., H, D] → the hidden state that is read next"""
        x = residual + self.o_proj(attended.flatten(-2))
        normed = self.post_attention_layernorm(x)
        out: Tensor = x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., draft vocab]"""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def tokens(self, ids: Tensor) -> Tensor:
        """The target's ids of draft tokens."""
        return self.draft_ids[ids]


@dataclass(frozen=True, slots=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]
    data: Any


# The head's modules under their names in the file.
_NAMES_IN_FILE = {
    "fc": "fc",
    "norm": "norm",
    "lm_head": "lm_head",
    "input_layernorm": _LAYER + "input_layernorm",
    "hidden_norm": _LAYER + "hidden_norm",
    "post_attention_layernorm": _LAYER + "post_attention_layernorm",
    **{name: f"{_LAYER}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"{_LAYER}mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}


def write_head(head: Eagle3Head, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config and weights to the folder, as vLLM's speculators layout has them."""
    import json

    path.mkdir(parents=True, exist_ok=True)
    config = head.config
    tensors: dict[str, Tensor] = {
        f"{stored}.weight": getattr(head, name).weight.detach().to(dtype)
        for name, stored in _NAMES_IN_FILE.items()
    }
    ids = head.draft_ids.cpu()
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[ids] = True
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(len(ids)), known
    write_safetensors(path / WEIGHTS, {name: _stored(tensor) for name, tensor in tensors.items()})
    (path / CONFIG).write_text(json.dumps(config.as_json(), indent=2) + "\n")


def _stored(tensor: Tensor) -> _Stored:
    data = tensor.cpu().contiguous()
    raw = data.view(torch.int16) if data.dtype == torch.bfloat16 else data
    return _Stored(_NAMES[tensor.dtype], tuple(tensor.shape), raw.numpy())


def read_head(
    path: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Eagle3Head:
    """Raises BrokenModel if a tensor is missing or has another shape."""
    config = read_config(path)
    file = SafetensorsFile(path / WEIGHTS)
    names = {stored: name for name, stored in _NAMES_IN_FILE.items()}
    offsets = read_tensor(file, "d2t", (config.draft_vocab_size,))
    head = Eagle3Head(config, offsets + torch.arange(config.draft_vocab_size))
    if int(head.draft_ids.min()) < 0 or int(head.draft_ids.max()) >= config.vocab_size:
        raise BrokenModel(
            f"{file.path}: d2t names ids that the vocabulary of {config.vocab_size} does not have"
        )
    with torch.no_grad():
        for stored, name in names.items():
            # EAGLE's own files call the layer midlayer.
            found = stored if f"{stored}.weight" in file.tensors else stored.replace(_LAYER, "midlayer.")
            weight = getattr(head, name).weight
            weight.copy_(read_tensor(file, f"{found}.weight", tuple(weight.shape)))
    return head.to(device=device, dtype=dtype).requires_grad_(False)
