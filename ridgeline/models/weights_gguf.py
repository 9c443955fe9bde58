"""GGUF checkpoints: dequantized tensor by tensor into the tensors `weights` allocated.

GGUF differs from Hugging Face files in three ways undone here: the llama architecture stores q and k for
interleaved rotation, Gemma's norms have their 1 added already, llama3 rope scaling is a tensor of divisors.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ridgeline.models.dequant import DEQUANTIZABLE, dequantize, dequantize_chunks
from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.families import FAMILIES
from ridgeline.models.gguf import GgufFile
from ridgeline.models.spec import ModelSpec
from ridgeline.models.weights_layout import Piece

_TOP_NAMES = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "post_attn_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_ffn_norm": "post_ffw_norm",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_HARMLESS = re.compile(r"^blk\.\d+\.attn_rot_embd\b")


class GgufSource:
    """One GGUF file of a model."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.file = GgufFile(path)
        self._interleaved = FAMILIES[spec.family].gguf_permutes_qk

    def name_of(self, piece: Piece) -> str:
        if piece.layer is None:
            return _TOP_NAMES[piece.role] + ".weight"
        kind = "bias" if piece.role.endswith("_bias") else "weight"
        return f"blk.{piece.layer}.{_LAYER_NAMES[piece.role.removesuffix('_bias')]}.{kind}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.file.tensors.items()}

    def where(self, name: str) -> Path:
        return self.file.path

    def is_harmless(self, name: str) -> bool:
        return name == _ROPE_DIVISORS or _HARMLESS.search(name) is not None

    def read_into(self, name: str, piece: Piece, out: Tensor) -> None:
        flat = out.view(-1)
        for first, values in dequantize_chunks(self.file.raw(name), self._type_of(name)):
            flat[first : first + len(values)].copy_(torch.from_numpy(values))
        if self._interleaved and piece.head_rows:
            for head in torch.split(out, piece.head_rows):
                _undo_interleaving(head)

    def rope_divisors(self) -> Tensor | None:
        if _ROPE_DIVISORS not in self.file.tensors:
            return None
        divisors = dequantize(self.file.raw(_ROPE_DIVISORS), self._type_of(_ROPE_DIVISORS))
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise BrokenModel(f"{self.file.path}: tensor {_ROPE_DIVISORS} holds values that are not positive")
        return torch.from_numpy(divisors)

    def _type_of(self, name: str) -> str:
        type_name = self.file.tensors[name].type
        if type_name not in DEQUANTIZABLE:
            raise UnsupportedModel(
                f"{self.file.path}: tensor {name} has type {type_name}; "
                f"readable: {', '.join(sorted(DEQUANTIZABLE))}"
            )
        return type_name


def _undo_interleaving(head: Tensor) -> None:
    """Rows of one head, in place: from pairs side by side to all firsts, then all seconds."""
    pairs = head.view(len(head) // 2, 2, -1)
    head.copy_(pairs.transpose(0, 1).reshape(head.shape))
