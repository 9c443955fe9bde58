"""Hugging Face checkpoints in safetensors: one file, or shards listed by an index. Memory-mapped.

Has the tensor names of the Llama-shaped families and the tensors to ignore; `safetensors_file` reads the
format.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.checkpoint_files import shard_paths
from ridgeline.models.files.safetensors_file import SafetensorsFile, SafetensorsTensor
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.dequant import Bytes, Floats, dequantize_chunks
from ridgeline.models.weights.layout import Piece

COMPARED_BYTES = 1 << 22  # bytes compared at a time
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")

# Text decoders inside a multimodal checkpoint have one of the longer prefixes.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_TOP_NAMES = {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
# With four norms per layer, post_attention_layernorm has its literal meaning.
_FOUR_NORM_NAMES = {
    "post_attn_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
}
# Rotary frequencies follow from the configuration; the vision part is not used.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\.")


class SafetensorsSource:
    """A model.safetensors file, or a model.safetensors.index.json and its shards."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path = path
        self.spec = spec
        self._files = {file: SafetensorsFile(file) for file in shard_paths(path)}
        self._places: dict[str, Path] = {}
        for file, handle in self._files.items():
            for name in handle.tensors:
                if name in self._places:
                    raise BrokenModel(f"{file}: tensor {name} is also in {self._places[name].name}")
                self._places[name] = file
        self._prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in self._places), "model.")
        self._head = next((name for name in _HEADS if name in self._places), _HEADS[0])
        self._names = _LAYER_NAMES | (_FOUR_NORM_NAMES if spec.layers[0].norms.after else {})
        self._check_tied_head()

    def name_of(self, piece: Piece) -> str:
        if piece.role == "lm_head":
            return self._head
        if piece.layer is None:
            return self._prefix + _TOP_NAMES[piece.role]
        return f"{self._prefix}layers.{piece.layer}.{self._names[piece.role]}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._files[file].tensors[name].shape for name, file in self._places.items()}

    def where(self, name: str) -> Path:
        return self._places[name]

    def is_harmless(self, name: str) -> bool:
        tied_head = name == self._head and self.spec.tied_embeddings
        return tied_head or _HARMLESS.search(name) is not None

    def type_of(self, name: str) -> str:
        dtype = self._files[self._places[name]].tensors[name].dtype
        if dtype not in READABLE_DTYPES:
            raise UnsupportedModel(
                f"{self.where(name)}: tensor {name} is stored as {dtype}; "
                f"safetensors weights are read from {', '.join(READABLE_DTYPES)}"
            )
        return dtype

    def raw(self, name: str) -> Bytes:
        return self._files[self._places[name]].raw(name)

    def place(self, name: str) -> SafetensorsTensor:
        """The location of the tensor's bytes in `where(name)`, for a loader that reads the file itself."""
        return self._files[self._places[name]].tensors[name]

    def row_order(self, piece: Piece) -> NDArray[np.intp] | None:
        return None

    def rope_divisors(self) -> Floats | None:
        return None

    def _check_tied_head(self) -> None:
        """Some tied checkpoints store the head as well: it must be identical to the embedding."""
        embed = f"{self._prefix}embed_tokens.weight"
        if not (self.spec.tied_embeddings and self._head in self._places and embed in self._places):
            return
        if not self._same(self._head, embed):
            raise BrokenModel(
                f"{self.where(self._head)}: {self._head} differs from {embed}, but config.json says "
                "they are tied; set tie_word_embeddings to false if the head is separate"
            )

    def _same(self, one: str, other: str) -> bool:
        shapes = self.shapes()
        if shapes[one] != shapes[other]:
            return False
        if self._same_bytes(one, other):  # nearly always; avoids converting to floats
            return True
        first, second = (dequantize_chunks(self.raw(name), self.type_of(name)) for name in (one, other))
        return all(np.array_equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))

    def _same_bytes(self, one: str, other: str) -> bool:
        first, second = self.raw(one), self.raw(other)
        return self.type_of(one) == self.type_of(other) and all(
            np.array_equal(first[at : at + COMPARED_BYTES], second[at : at + COMPARED_BYTES])
            for at in range(0, len(first), COMPARED_BYTES)
        )
