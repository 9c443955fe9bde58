"""Checkpoints as GPTQ, AWQ and FP8 tools write them, made of a GGUF model: for comparisons of speed.

Weights are rounded to nearest, which takes as long to compute as what those tools find. `write_folder` with
no format keeps them in bfloat16: the reference of quantize_quality.py. Called by cpu_vs_llamacpp.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.files.safetensors_writer import write_safetensors
from ridgeline.models.quantized.format import fp8_format, int4_format
from ridgeline.models.quantized.matrix import QuantizedMatrix
from ridgeline.models.quantized.numbers import to_bfloat16
from ridgeline.models.quantized.packings import StoredTensor
from ridgeline.models.quantized.rounding import quantize
from ridgeline.models.spec.families import FAMILIES as KNOWN
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.text.gguf_tokenizer import read_gguf_tokenizer
from ridgeline.models.weights.checkpoint import checked_places, float_chunks, open_source
from ridgeline.models.weights.places import find_places

Tensors = dict[str, StoredTensor]
# By family: what its config.json needs besides the sizes.
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Kind:
    """A producer's format: how a matrix is stored, and config.json's quantization_config."""

    stored: Callable[[NDArray[np.float32]], Tensors]
    settings: dict[str, Any]


def kind_of(name: str, group: int) -> Kind:
    """name: gptq (4 bits, symmetric), awq (4 bits, zero points) or fp8 (blocks of 128×128)."""
    half = int4_format(group, zero_point=name == "awq", scale="float16")
    if name == "gptq":
        settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
        return Kind(lambda weights: _gptq(quantize(weights, half)), settings)
    if name == "awq":
        settings = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "version": "gemm",
            "zero_point": True,
        }
        return Kind(lambda weights: _awq(quantize(weights, half)), settings)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return Kind(lambda weights: _fp8(quantize(weights, fp8_format("block"))), settings)


def write_folder(file: Path, folder: Path, kind: Kind | None = None) -> Path:
    """A GGUF model in Hugging Face's layout, with its tokenizer. Embeddings, norms and biases in bfloat16."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    spec = read_spec(file)
    source = open_source(file, spec)
    names = KNOWN[spec.family].hf_names
    ours = find_places(spec, names, names.prefixes[0], names.heads[0])
    tensors: Tensors = {}
    for piece, place in checked_places(source, spec, file).items():
        name = ours[piece].name
        values = np.concatenate([part for _, part in float_chunks(source, piece, place)])
        if kind is None or piece.layer is None or len(piece.shape) < 2:
            tensors[name] = StoredTensor("BF16", piece.shape, to_bfloat16(values).view(np.uint8).reshape(-1))
            continue
        module = name.removesuffix(".weight")
        parts = kind.stored(values.reshape(piece.shape).astype(np.float32, copy=False))
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    parts = read_gguf_tokenizer(GgufFile(file).metadata, str(file))
    parts.backend.save(str(folder / "tokenizer.json"))
    settings = {**parts.special_tokens, "chat_template": parts.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = _config(spec) | ({"quantization_config": kind.settings} if kind else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _config(spec: ModelSpec) -> dict[str, Any]:
    mixer = spec.attentions[0]
    assert mixer.rope is not None
    return {
        **FAMILIES[spec.family],
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm.eps,
        "rope_theta": mixer.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids),
        "torch_dtype": "bfloat16",
    }


# ---- packings, as the producers lay them out ----


def _gptq(matrix: QuantizedMatrix) -> Tensors:
    groups = np.arange(matrix.shape[1], dtype="<i4") // matrix.format.group[1]
    zeros = np.full(matrix.scales.T.shape, 7, np.uint8)  # 8, stored less one
    return {
        "qweight": _tensor("I32", np.ascontiguousarray(_words(_unsigned(matrix.codes)).T)),
        "qzeros": _tensor("I32", _words(zeros)),
        "scales": _tensor("F16", matrix.scales.T.astype("<f2")),
        "g_idx": _tensor("I32", groups.astype("<i4")),
    }


def _awq(matrix: QuantizedMatrix) -> Tensors:
    assert matrix.zeros is not None
    return {
        "qweight": _tensor("I32", _words(_unsigned(matrix.codes).T, AWQ_ORDER)),
        "qzeros": _tensor("I32", _words(_unsigned(matrix.zeros).T, AWQ_ORDER)),
        "scales": _tensor("F16", matrix.scales.T.astype("<f2")),
    }


def _fp8(matrix: QuantizedMatrix) -> Tensors:
    return {
        "weight": _tensor("F8_E4M3", matrix.codes.view(np.uint8)),
        "weight_scale_inv": _tensor("F32", matrix.scales.astype("<f4")),
    }


def _unsigned(codes: NDArray[Any]) -> NDArray[np.uint8]:
    return (codes.astype(np.int8) + np.int8(8)).view(np.uint8)


def _words(nibbles: NDArray[np.uint8], order: tuple[int, ...] = tuple(range(8))) -> NDArray[np.uint32]:
    """[..., 8 · n] of 0 … 15 → [..., n]: nibble i of a word is element order[i] of eight."""
    words = np.zeros((*nibbles.shape[:-1], nibbles.shape[-1] // 8), "<u4")
    for place, element in enumerate(order):
        words |= nibbles[..., element::8].astype("<u4") << np.uint32(4 * place)
    return words


def _tensor(dtype: str, values: NDArray[Any]) -> StoredTensor:
    flat = np.ascontiguousarray(values)
    return StoredTensor(dtype, tuple(values.shape), flat.reshape(-1).view(np.uint8))
