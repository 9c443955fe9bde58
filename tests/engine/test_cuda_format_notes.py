"""What the start of a GPU engine says about a file's formats, and which settings it refuses: decided before a
device is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.start.cuda_build import CudaBuild
from ridgeline.engine.start.loading import kv_notes
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.stream import stream_weights
from ridgeline.models.weights.torch_weights import load_weights, tensors_of
from ridgeline.ops.mxfp4 import Mxfp4
from tests.models.quantized.writers import LAYOUTS, Layout, write_quantized
from tests.models.tiny_checkpoints import packed_as, tiny_model, write_gguf


def build(path: Path, **settings: Any) -> CudaBuild:
    return CudaBuild(EngineConfig(**settings), path, read_spec(path), 1)


def quantized(tmp_path: Path, model: str, layout: Layout) -> Path:
    tiny_model(model).save_pretrained(tmp_path / "float")
    write_quantized(tmp_path / "float", tmp_path / "quantized", tmp_path / "twin", layout)
    return tmp_path / "quantized"


# ---- what a file has its matrices in ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_that_are_rounded_are_named_by_their_bits(tmp_path: Path, dtype: str) -> None:
    tiny_model("qwen3").to(getattr(torch, dtype)).save_pretrained(tmp_path)
    (note,) = build(tmp_path, weights="fp8")._notes()
    bits = {"float32": 32, "bfloat16": 16}[dtype]
    assert f"matrices stored as {bits} bits are rounded to FP8 (a scale per row)" in note
    kept = build(tmp_path, weights="fp8", quantization_keep=("attention",))._notes()
    verb = {"float32": "are rounded to", "bfloat16": "stay in"}[dtype]
    assert any(f"stored as {bits} bits {verb} 16 bits: the policy keeps them" in note for note in kept)


def test_types_of_gguf_that_are_rounded_again_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny_model("qwen3"), file, packed_as(gguf.GGMLQuantizationType.Q4_0))
    (note,) = build(file, weights="fp8")._notes()
    assert "matrices stored as Q4_0 are rounded to FP8 (a scale per row)" in note


def test_experts_of_gpt_oss_that_are_rounded_are_named(tmp_path: Path) -> None:
    tiny_model("gpt-oss-mxfp4").save_pretrained(tmp_path)
    notes = build(tmp_path, weights="fp8")._notes()
    assert any("matrices stored as MXFP4 are rounded to FP8 (a scale per row)" in note for note in notes)
    notes = build(tmp_path, weights="int4")._notes()
    expected = "stored as MXFP4 are expanded to 16 bits: experts are not computed in int4"
    assert any(expected in note for note in notes)


# ---- experts in MXFP4 and the policy ----


def test_the_policy_expands_the_experts_of_gpt_oss(tmp_path: Path) -> None:
    tiny_model("gpt-oss-mxfp4").save_pretrained(tmp_path)
    stored = build(tmp_path)
    expanded = build(tmp_path, quantization_keep=("experts",))
    assert stored._stored_experts
    assert stored._notes() == ("experts are computed as stored, in MXFP4",)
    assert not expanded._stored_experts
    assert expanded._notes() == ("experts stored as MXFP4 are expanded to 16 bits: the policy keeps them",)
    spec = read_spec(tmp_path)
    made = stream_weights(tmp_path, spec, torch.bfloat16, device="cpu", stored_experts=False)
    assert expanded.weights_bytes == made.nbytes > stored.weights_bytes
    plain = tensors_of(load_weights(tmp_path, spec, torch.bfloat16))
    for ours, theirs in zip(tensors_of(made).layers, plain.layers, strict=True):
        assert torch.equal(ours.experts_down, theirs.experts_down)


def test_the_policy_expands_mxfp4_experts_of_compressed_tensors(tmp_path: Path) -> None:
    path = quantized(tmp_path, "qwen3-moe", LAYOUTS["mxfp4"])
    expanded = build(path, quantization_keep=("experts",))
    made = stream_weights(
        path, read_spec(path), torch.bfloat16, device="cpu", stored_experts=expanded._stored_experts
    )
    assert not any(isinstance(layer.experts_down, Mxfp4) for layer in tensors_of(made).layers)
    assert any("are expanded to 16 bits: the policy keeps them" in note for note in expanded._notes())


@pytest.mark.parametrize("model", ["gpt-oss-mxfp4", "qwen3-moe"])
def test_a_policy_that_keeps_some_experts_in_mxfp4_is_refused_by_name(tmp_path: Path, model: str) -> None:
    if model == "qwen3-moe":
        path = quantized(tmp_path, model, LAYOUTS["mxfp4"])
    else:
        tiny_model(model).save_pretrained(tmp_path)
        path = tmp_path
    message = r"--quantization-keep layers\.0: experts stored as MXFP4 .* Use --quantization-keep experts"
    with pytest.raises(InvalidConfig, match=message):
        build(path, quantization_keep=("attention", "layers.0"))
    assert build(path, quantization_keep=("attention", "layers.0.attention"))._stored_experts


# ---- inputs that are not rounded as the file asks ----


def test_inputs_with_zero_points_stay_in_16_bits_and_it_is_said(tmp_path: Path) -> None:
    layout = LAYOUTS["int8"]
    group = layout.config["config_groups"]["group_0"]
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}
    config = layout.config | {"config_groups": {"group_0": {**group, "input_activations": inputs}}}
    made = build(quantized(tmp_path, "qwen3", layout._replace(config=config)))
    assert made._low.formats
    assert not any(format.inputs for format in made._low.formats.values())
    (note,) = made._notes()
    assert note.endswith("with inputs in 16 bits, not in int8 with zero points as the file asks")


def test_inputs_of_an_expanded_matrix_are_not_rounded_and_it_is_said(tmp_path: Path) -> None:
    (note,) = build(quantized(tmp_path, "qwen3", LAYOUTS["modelopt-nvfp4"]))._notes()
    assert note.endswith("no GPU kernel computes it; inputs are not rounded to FP4, as the file asks")


# ---- the KV cache that a file asks for ----


def test_a_kv_format_of_the_file_is_named_and_its_scales_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    layout = LAYOUTS["modelopt-fp8"]
    layout = layout._replace(config={**layout.config, "kv_cache_quant_algo": "FP8"})
    path = quantized(tmp_path, "qwen3", layout)
    asked = "the KV cache is in bfloat16 (--kv-dtype), not in FP8 as the file asks"
    assert kv_notes(read_spec(path), path, "bfloat16") == (asked,)
    assert kv_notes(read_spec(path), path, "fp8") == ()
    tensors = load_file(path / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{part}_proj.{part}_scale": torch.tensor(0.5) for part in "kv"}
    save_file(tensors | scales, path / "model.safetensors")
    unused = "the file's scales of keys and values (k_scale, v_scale) are not used"
    assert kv_notes(read_spec(path), path, "bfloat16") == (f"{asked}; {unused}",)
    assert kv_notes(read_spec(path), path, "fp8") == (unused,)
    assert kv_notes(replace(read_spec(path), kv_asked=""), path, "bfloat16") == (unused,)
