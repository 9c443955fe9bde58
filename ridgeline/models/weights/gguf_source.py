"""GGUF checkpoints as a source of tensors: their names and the format's peculiarities.

GGUF differs from Hugging Face files in three ways: the llama architecture stores q and k for interleaved
rotation (`row_order` undoes it), Gemma's norms already include their 1 (a GGUF file's spec adds none), and
llama3 rope scaling may be a tensor of divisors.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.spec.families import FAMILIES
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.dequant import Bytes, Floats, dequantize
from ridgeline.models.weights.layout import Piece

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

    def type_of(self, name: str) -> str:
        return self.file.tensors[name].type

    def raw(self, name: str) -> Bytes:
        return self.file.raw(name)

    def row_order(self, piece: Piece) -> NDArray[np.intp] | None:
        """Reorders each rotated head from adjacent pairs to all first elements, then all second ones."""
        if not (self._interleaved and piece.head_rows):
            return None
        rows = np.arange(piece.shape[0]).reshape(-1, piece.head_rows // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)

    def rope_divisors(self) -> Floats | None:
        if _ROPE_DIVISORS not in self.file.tensors:
            return None
        divisors = dequantize(self.file.raw(_ROPE_DIVISORS), self.type_of(_ROPE_DIVISORS))
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise BrokenModel(
                f"{self.file.path}: tensor {_ROPE_DIVISORS} contains values that are not positive"
            )
        return divisors
