"""What is special to one family of routed experts: routing, stored formats, keys that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from ridgeline.engine.start.loading import expansion_notes
from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.mixers import QueryScale
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.spec.readers.hf_config import spec_from_hf
from ridgeline.models.weights.packed import load_packed
from ridgeline.ops import reference
from ridgeline.ops.cpu.library import unpack
from tests.models.test_packed import gate_and_up
from tests.models.test_spec_transformers import EXPERTS, reference_config
from tests.models.test_weights import assert_same, load
from tests.models.tiny_checkpoints import gguf_tensors, packed_as, tiny_model, write_gguf

F32 = gguf.GGMLQuantizationType.F32
MXFP4 = gguf.GGMLQuantizationType.MXFP4


def read(name: str, **changes: Any) -> ModelSpec:
    return spec_from_hf({**reference_config(EXPERTS[name]).to_dict(), **changes}, name="tiny")


@pytest.mark.parametrize("margin", [0.02, 0.6, 3.0])
def test_sparsemixer_routes_as_the_reference_does(margin: float) -> None:
    logits = torch.randn(200, 16, generator=torch.Generator().manual_seed(1)) * 2
    chosen, weights = reference.route(logits, 2, scores="sparsemixer", margin=margin)
    expected, experts = sparsemixer(logits, jitter_eps=margin / 2, training=False)
    assert torch.equal(chosen, experts)
    torch.testing.assert_close(weights, expected)
    shared = (weights < 1).float().mean().item()  # a wide margin lets several experts share a softmax
    assert shared < 0.2 if margin < 0.1 else shared > 0.5


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("olmoe", {"swiglu_limit": 7.0}, "swiglu_limit = 7.0"),
        ("granitemoe", {"attention_chunk_size": 16}, "attention_chunk_size = 16"),
        ("qwen3-moe", {"scoring_func": "sigmoid"}, "scoring_func"),
    ],
)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str
) -> None:
    read(name)
    with pytest.raises(UnsupportedModel) as refusal:
        read(name, **changes)
    assert words in str(refusal.value)


def test_llama4_layers_rotate_within_chunks_or_scale_queries_over_everything() -> None:
    spec = read("llama4-alternating", use_qk_norm=True)
    *rotated, last = spec.attentions
    for mixer in rotated:
        assert (mixer.window, mixer.chunked, mixer.qk_norm, mixer.query_scale) == (9, True, "unit", None)
        assert mixer.rope is not None
    assert (last.window, last.chunked, last.qk_norm, last.rope) == (None, False, "", None)
    assert last.query_scale == QueryScale(0.5, 20.0)
    assert [isinstance(layer.ffn, Experts) for layer in spec.layers] == [False, True, False, True]
    listed = read("llama4-alternating", moe_layers=[0], attn_temperature_tuning=False)
    assert [isinstance(layer.ffn, Experts) for layer in listed.layers] == [True, False, False, False]
    assert listed.attentions[-1].query_scale is None


def test_llama4_with_vision_is_read_from_its_text_config() -> None:
    text = reference_config(EXPERTS["llama4"]).to_dict()
    outer = {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "image_token_index": 5,
    }
    spec = spec_from_hf(outer, name="tiny")
    assert spec.layers == read("llama4").layers
    assert spec.notes == ("the vision tower is left out: text in, text out",)


# ---- MXFP4 ----


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """gpt-oss as it is published, for tests to damage."""
    tiny_model("gpt-oss-mxfp4").save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_mxfp4_experts_are_expanded_and_it_is_said(published: Path) -> None:
    spec = read_spec(published)
    assert spec.weight_format == "mxfp4"
    check_servable(spec)
    packed = load_packed(published, spec, keep=False)
    assert "6 tensors stored as MXFP4 are expanded, with steps below 2^-24 rounded, to int8" in packed.notes
    exact = load_packed(published, spec, weights="bfloat16", keep=False)
    assert "6 tensors stored as MXFP4 are expanded, with the same values, to bfloat16" in exact.notes
    for dtype, change in (("float32", "the same values"), ("float16", "steps below 2^-24 rounded")):
        note = f"experts stored as MXFP4 are expanded to {dtype} when loaded, with {change}"
        assert expansion_notes(spec, dtype) == (note,)


def test_mxfp4_in_a_family_that_is_not_published_so_is_refused() -> None:
    spec = read("olmoe", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UnsupportedModel, match="quantized as mxfp4"):
        check_servable(spec)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda scales: scales[:, :-1].contiguous(),
        lambda scales: scales.to(torch.int16),
    ],
)
def test_scales_that_do_not_fit_their_blocks_are_named(published: Path, spoil: Any) -> None:
    file = published / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = spoil(tensors[name])
    save_file(tensors, file)
    with pytest.raises(BrokenModel, match=r"1\.mlp\.experts\.down_proj_scales .* not the blocks and scales"):
        load(published)


def test_a_gguf_file_of_mxfp4_experts_loads_as_the_published_checkpoint(
    published: Path, tmp_path: Path
) -> None:
    model = tiny_model("gpt-oss-mxfp4")
    model.save_pretrained(tmp_path / "again")  # rounds the model's own experts

    def pack(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if not name.endswith("_exps.weight"):
            return values, F32
        return gguf.quants.quantize(values, MXFP4), MXFP4

    write_gguf(model, tmp_path / "tiny.gguf", pack, gguf_tensors(model))
    assert_same(load(tmp_path / "tiny.gguf"), load(published))
    packed = load_packed(tmp_path / "tiny.gguf", read_spec(tmp_path / "tiny.gguf"), keep=False)
    assert "9 tensors stored as MXFP4 are expanded, with steps below 2^-24 rounded, to int8" in packed.notes


def test_biases_in_blocks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("gpt-oss-mxfp4"), path, packed_as(MXFP4))
    with pytest.raises(BrokenModel, match="a bias must be stored as floats"):
        load(path)


@pytest.mark.parametrize(
    ("name", "kind"), [("mixtral", "Q4_0"), ("olmoe", "Q8_0"), ("gpt-oss-mxfp4", "MXFP4")]
)
def test_stacks_of_experts_are_packed_with_the_values_of_the_file(
    name: str, kind: str, tmp_path: Path
) -> None:
    quantized = packed_as(gguf.GGMLQuantizationType[kind])

    def pack(tensor: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        return (values, F32) if tensor.endswith(".bias") else quantized(tensor, values)

    path, size = tmp_path / "tiny.gguf", 96
    write_gguf(tiny_model(name), path, pack)
    packed, weights = load_packed(path, read_spec(path), keep=False), load(path)
    for index, layer in enumerate(weights.layers):
        assert layer.experts_gate_up is not None
        assert layer.experts_down is not None
        gate_up = unpack(packed.matrix(index, "experts_gate_up")).reshape(-1, 2 * size, 64)
        gate_up = np.stack([gate_and_up(expert) for expert in gate_up])
        assert np.array_equal(gate_up, layer.experts_gate_up.tensor.numpy())
        down = unpack(packed.matrix(index, "experts_down")).reshape(-1, 64, size)
        assert np.array_equal(down, layer.experts_down.tensor.numpy())
