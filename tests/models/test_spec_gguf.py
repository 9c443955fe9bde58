"""Reading GGUF metadata: the real SmolLM2, tiny files of every family, and refusals that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.spec.readers.gguf_config import spec_from_gguf
from ridgeline.models.spec.rope import RopeScaling, RopeSpec
from tests.models.tiny_checkpoints import add_value

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 32, 4, 2, 8, 48, 100, 7
KEYS: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5,
}
GEMMA_KEYS = {
    **KEYS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.sliding_window": 16,
}
TOKENS = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}


def tensors(
    *, bias: bool = False, qk_norm: bool = False, post_norms: bool = False
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, q),
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }
    if bias:
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if qk_norm:
        layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if post_norms:
        layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    for index in range(LAYERS):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


QWEN2, QWEN3 = tensors(bias=True), tensors(qk_norm=True)
GEMMA3 = tensors(qk_norm=True, post_norms=True)
UNTIED = {"output.weight": (VOCAB, HIDDEN)}


def write(
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    *,
    metadata: dict[str, Any] | None = None,
    divisors: np.ndarray[Any, Any] | None = None,
) -> GgufFile:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**{f"{architecture}.{k}": v for k, v in keys.items()}, **(metadata or TOKENS)}.items():
        add_value(writer, key, value)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float16 if len(shape) == 2 else np.float32))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def read(tmp_path: Path, architecture: str, keys: dict[str, Any], shapes: Any, **more: Any) -> ModelSpec:
    return spec_from_gguf(write(tmp_path / "tiny.F16.gguf", architecture, keys, shapes, **more))


def without(keys: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if name != key}


# ---- what is read ----


def test_smollm2_has_the_parameters_its_makers_state(smollm2_path: Path) -> None:
    spec = spec_from_gguf(GgufFile(smollm2_path))
    assert spec.parameters == 134_515_008
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.ffn_size) == ("llama", 30, 576, 1536)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.vocab_size, spec.max_context, spec.tied_embeddings) == (49_152, 8192, True)
    assert spec.attentions[0].rope == RopeSpec(100_000.0, 64)
    assert spec.norm.eps == 1e-5
    assert spec.attentions[0].scale == 0.125
    assert (spec.bos_id, spec.eos_ids, spec.pad_id) == (1, (2, 0), 2)
    assert spec.weight_format == "gguf:Q4_1"
    assert spec.stored_bytes == sum(tensor.nbytes for tensor in GgufFile(smollm2_path).tensors.values())


@pytest.mark.parametrize(
    ("architecture", "keys", "shapes", "flags"),
    [
        ("llama", KEYS, tensors(), (False, False, False)),
        ("llama", KEYS, tensors(bias=True), (True, False, False)),
        ("qwen2", KEYS, QWEN2, (True, False, False)),
        ("qwen3", KEYS, QWEN3, (False, True, False)),
        ("gemma3", GEMMA_KEYS, GEMMA3, (False, True, True)),
    ],
)
def test_each_family_is_read_with_its_flags(
    tmp_path: Path, architecture: str, keys: dict[str, Any], shapes: Any, flags: tuple[bool, ...]
) -> None:
    spec = read(tmp_path, architecture, keys, shapes)
    assert spec.family == architecture
    attention = spec.attentions[0]
    assert (attention.qkv_bias, bool(attention.qk_norm), spec.layers[0].norms.after) == flags
    assert spec.name == "tiny.F16"
    assert spec.weight_format == "gguf:F16"
    assert (spec.vocab_size, spec.head_dim, spec.tied_embeddings) == (VOCAB, HEAD_DIM, True)


def test_an_output_tensor_means_the_lm_head_is_not_tied(tmp_path: Path) -> None:
    assert not read(tmp_path, "llama", KEYS, tensors() | UNTIED).tied_embeddings


def test_a_llama_file_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    spec = read(tmp_path, "llama", {**KEYS, "attention.sliding_window": 16}, tensors())
    assert spec.family == "mistral"
    assert [mixer.window for mixer in spec.attentions] == [16] * LAYERS


def test_gemma_alternates_windows_and_keeps_its_local_rope_unscaled(tmp_path: Path) -> None:
    keys = {**GEMMA_KEYS, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    spec = read(tmp_path, "gemma3", keys, GEMMA3)
    assert [mixer.window for mixer in spec.attentions] == [16] * 5 + [None, 16]
    assert spec.attentions[5].rope == RopeSpec(5e5, HEAD_DIM, RopeScaling("linear", 8.0))
    assert spec.attentions[0].rope == RopeSpec(1e4, HEAD_DIM)
    assert spec.norm.offset == 0.0  # the file has the 1 added
    assert spec.embedding_scale == pytest.approx(HIDDEN**0.5)
    assert spec.layers[0].ffn.activation == "gelu_tanh"


def test_yarn_is_read_and_extends_the_context(tmp_path: Path) -> None:
    keys = {
        **KEYS,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 256,
    }
    spec = read(tmp_path, "qwen2", keys, QWEN2)
    assert spec.attentions[0].rope.scaling == RopeScaling("yarn", 4.0, 256)
    assert spec.max_context == 1024


def test_the_ends_of_text_turn_and_message_all_end_a_generation(tmp_path: Path) -> None:
    ends = {f"tokenizer.ggml.{end}_token_id": token for end, token in (("eos", 5), ("eot", 7), ("eom", 5))}
    assert read(tmp_path, "llama", KEYS, tensors(), metadata=ends).eos_ids == (5, 7)


def llama3_divisors(factor: float) -> np.ndarray[Any, Any]:
    """Written out case by case, as the format's converter does."""
    divisors = []
    for index in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * 5e5 ** (index / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors)


def test_rope_divisors_of_the_published_llama3_scaling_are_recognized(tmp_path: Path) -> None:
    spec = read(tmp_path, "llama", KEYS, tensors(), divisors=llama3_divisors(32.0))
    assert spec.attentions[0].rope.scaling == RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)
    assert spec.notes == ()


def test_other_rope_divisors_are_left_to_the_loader_and_noted(tmp_path: Path) -> None:
    spec = read(tmp_path, "llama", KEYS, tensors(), divisors=np.array([1.0, 2.0, 3.0, 4.0]))
    assert spec.attentions[0].rope.scaling is None
    assert spec.notes == ("rotary frequencies are divided by the file's own rope_freqs.weight",)


# ---- what is refused ----


@pytest.mark.parametrize(
    "key", [key for key in KEYS if key not in ("rope.freq_base", "attention.head_count_kv")]
)
def test_a_missing_key_is_named_in_full(tmp_path: Path, key: str) -> None:
    with pytest.raises(BrokenModel, match=f"llama.{key} is missing"):
        read(tmp_path, "llama", without(KEYS, key), tensors())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert_group_count": 4}, "llama.expert_group_count"),
        ({"attention.key_length": 8, "attention.value_length": 4}, "value heads of another size"),
        ({"rope.dimension_count": 4}, "partial rotation of heads"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.attn_factor": 1.5}, "attn_factor"),
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv"),
        ({"pooling_type": 3}, "llama.pooling_type"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        read(tmp_path, "llama", {**KEYS, **keys}, tensors())
    assert words in str(refusal.value)
    assert "tiny.F16.gguf" in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"block_count": 10**6}, "block_count is 1000000"),
        ({"embedding_length": "32"}, "an integer was expected"),
        ({"attention.head_count_kv": [2] * LAYERS}, "an integer was expected"),
        ({"attention.head_count_kv": 3}, "is not a multiple of"),
        ({"embedding_length": 64}, "not (vocabulary, 64)"),
        ({"rope.scaling.type": "yarn"}, "yarn needs"),
        ({"feed_forward_length": 64}, "its metadata describes"),
    ],
)
def test_metadata_that_cannot_be_is_refused(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(BrokenModel) as refusal:
        read(tmp_path, "llama", {**KEYS, **keys}, tensors())
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("architecture", "keys", "shapes", "words"),
    [
        ("qwen2", KEYS, tensors(), "qwen2 lacks biases on q, k and v"),
        ("qwen3", KEYS, tensors(), "qwen3 lacks QK-norm"),
        ("llama", KEYS, QWEN3, "llama has unexpected QK-norm"),
        ("gemma3", GEMMA_KEYS, QWEN3, "gemma3 lacks norms after attention and FFN"),
        ("gemma3", without(GEMMA_KEYS, "attention.sliding_window"), GEMMA3, "needs attention.sliding_window"),
        ("llama", KEYS, without(tensors(), "blk.3.ffn_up.weight"), "its tensors have"),
        ("llama", KEYS, {**tensors(), "blk.0.attn_sinks.weight": (4,)}, "unknown to this version"),
        ("llama", KEYS, without(tensors(), "token_embd.weight"), "no tensor token_embd.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_family_are_refused(
    tmp_path: Path, architecture: str, keys: dict[str, Any], shapes: Any, words: str
) -> None:
    with pytest.raises(BrokenModel) as refusal:
        read(tmp_path, architecture, keys, shapes)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ({}, "The nearest supported architecture is llama. `ridgeline models support`"),
        ({"blk.0.attn_q_norm.weight": (8,), "blk.0.attn_k_norm.weight": (8,)}, "architecture is qwen3."),
        ({"blk.0.ssm_a": (4,)}, "architecture is llama, which does not read ssm_a."),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest_one(
    tmp_path: Path, more: dict[str, Any], advice: str
) -> None:
    with pytest.raises(UnsupportedModel, match="'lama' is not supported") as refusal:
        read_spec(write(tmp_path / "tiny.F16.gguf", "lama", KEYS, {**tensors(), **more}).path)
    assert advice in str(refusal.value)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [({"split.count": 3}, "one of 3 parts"), ({"general.type": "adapter"}, "not a complete model")],
)
def test_a_part_of_a_model_is_refused(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read(tmp_path, "llama", KEYS, tensors(), metadata=metadata)


def test_rope_divisors_where_they_mean_nothing_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight in the family qwen3"):
        read(tmp_path, "qwen3", KEYS, QWEN3, divisors=llama3_divisors(8.0))
    with pytest.raises(BrokenModel, match=r"rope_freqs.weight is F32"):
        read(tmp_path, "llama", KEYS, tensors(), divisors=np.ones(3))


def test_a_special_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="special token 100 is outside the vocabulary of 100"):
        read(tmp_path, "llama", KEYS, tensors(), metadata={"tokenizer.ggml.eos_token_id": VOCAB})
