"""GGUF files load to the weights of the checkpoint they were made from, for every type and architecture."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.errors import BrokenModel
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.torch_weights import load_weights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.models.test_dequant import random_blocks
from tests.models.test_weights import assert_same, load
from tests.models.tiny_checkpoints import GGUF_MODELS, gguf_tensors, packed_as, tiny_model, write_gguf

F32 = GGMLQuantizationType.F32


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_every_architecture_loads_as_its_safetensors_do(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "hf")
    write_gguf(model, tmp_path / "tiny.gguf", packed_as(F32))
    ours, theirs = read_spec(tmp_path / "tiny.gguf"), read_spec(tmp_path / "hf")
    weights, expected = load(tmp_path / "tiny.gguf"), load(tmp_path / "hf")
    # Stored differently: the name, the type, Gemma's 1, a padding token; scales in single precision.
    layers = []
    for index, (layer, mixer) in enumerate(zip(theirs.layers, ours.attentions, strict=True)):
        assert isinstance(layer.mixer, Attention)
        assert mixer.scale == pytest.approx(layer.mixer.scale)
        rope = layer.mixer.rope
        if rope is not None and rope.scaling is not None:
            assert mixer.rope.scaling.attention_factor == pytest.approx(rope.scaling.attention_factor)
            rope = replace(rope, scaling=mixer.rope.scaling)
        if rope is None and not theirs.learned_positions:
            # The converter reorders q and k alike, and without rotation their order changes no score.
            expected.layers[index] = replace(expected.layers[index], qkv=weights.layers[index].qkv)
        layers.append(replace(layer, mixer=replace(layer.mixer, scale=mixer.scale, rope=rope)))
    assert_same(weights, expected)
    norm = replace(theirs.norm, offset=0.0)
    same = replace(theirs, layers=tuple(layers), norm=norm, pad_id=None, notes=())
    for field in fields(ours):
        if field.name not in ("name", "weight_format", "stored_bytes", "notes"):
            assert getattr(ours, field.name) == getattr(same, field.name), field.name


def test_a_gguf_file_with_layers_without_rotation_computes_the_same(tmp_path: Path) -> None:
    model = tiny_model("smollm3")
    write_gguf(model, tmp_path / "tiny.gguf", packed_as(F32))
    spec = read_spec(tmp_path / "tiny.gguf")
    assert [mixer.rope is None for mixer in spec.attentions] == [False, False, False, True]
    decoder = Decoder(spec, load(tmp_path / "tiny.gguf"), select_backend("torch"))
    tokens = list(range(1, 60))
    inputs = StepInputs.from_rows([InputRow(tokens, 0, range(4), 0)], 16)
    with torch.inference_mode():
        logits = decoder.forward(inputs, allocate_kv(spec, 4, 16, torch.float32))
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_matrices_load_as_the_rounded_checkpoint(kind: str, tmp_path: Path) -> None:
    """Quantization is row by row, so rounding first and permuting q and k after gives the same rows."""
    model = tiny_model("llama")
    quantization = GGMLQuantizationType[kind]
    write_gguf(model, tmp_path / "tiny.gguf", packed_as(quantization))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            packed = gguf.quants.quantize(parameter.detach().numpy(), quantization)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(packed, quantization).copy())
    model.save_pretrained(tmp_path / "hf")
    assert_same(load(tmp_path / "tiny.gguf"), load(tmp_path / "hf"))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_load_as_the_gguf_package_decodes_them(kind: str, tmp_path: Path) -> None:
    """Random blocks: the gguf package reads these types, but cannot write them."""
    model = tiny_model("qwen3-wide")
    quantization = GGMLQuantizationType[kind]
    blocks: dict[str, np.ndarray] = {}

    def pack(name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        if values.ndim == 1:
            return values, F32
        count = values.size // 256
        blocks[name] = random_blocks(kind, count, seed=len(name)).reshape(len(values), -1)
        return blocks[name], quantization

    write_gguf(model, tmp_path / "tiny.gguf", pack)
    weights = load(tmp_path / "tiny.gguf")
    expected = {name: gguf.quants.dequantize(raw, quantization) for name, raw in blocks.items()}
    qkv = np.concatenate([expected[f"blk.0.attn_{part}.weight"] for part in "qkv"])
    gate_up = np.concatenate([expected[f"blk.0.ffn_{part}.weight"] for part in ("gate", "up")])
    assert np.array_equal(weights.embed.tensor.numpy(), expected["token_embd.weight"])
    assert np.array_equal(weights.layers[0].qkv.tensor.numpy(), qkv)
    assert np.array_equal(weights.layers[0].gate_up.tensor.numpy(), gate_up)
    assert np.array_equal(weights.layers[0].down.tensor.numpy(), expected["blk.0.ffn_down.weight"])


def test_rope_divisors_of_a_file_replace_the_llama3_scaling(tmp_path: Path) -> None:
    """The scaling is not a published one, so only rope_freqs.weight can carry it."""
    model = tiny_model("llama-llama3")
    rotary: Any = model.model.rotary_emb
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / rotary.inv_freq).numpy().astype(np.float32)
    tensors = {**gguf_tensors(model), "rope_freqs.weight": divisors}
    write_gguf(model, tmp_path / "tiny.gguf", packed_as(F32), tensors)
    spec = read_spec(tmp_path / "tiny.gguf")
    assert spec.attentions[0].rope.scaling is None
    decoder = Decoder(spec, load(tmp_path / "tiny.gguf"), select_backend("torch"))
    tokens = list(range(1, 90))
    inputs = StepInputs.from_rows([InputRow(tokens, 0, range(6), 0)], 16)
    with torch.inference_mode():
        logits = decoder.forward(inputs, allocate_kv(spec, 6, 16, torch.float32))
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused_by_tensor_and_file(scale: float, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"

    def pack(name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        packed, kind = packed_as(GGMLQuantizationType.Q4_0)(name, values)
        if name == "blk.1.ffn_down.weight":
            packed[3, :2] = np.array([scale], dtype="<f2").view(np.uint8)
        return packed, kind

    write_gguf(tiny_model("llama"), path, pack)
    with pytest.raises(BrokenModel, match=r"tiny\.gguf: tensor blk\.1\.ffn_down\.weight .* not finite"):
        load(path)


def test_a_tensor_the_file_lacks_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(model, tmp_path / "whole.gguf", packed_as(F32))
    spec = read_spec(tmp_path / "whole.gguf")
    tensors = gguf_tensors(model)
    del tensors["blk.2.attn_v.weight"]
    write_gguf(model, tmp_path / "tiny.gguf", packed_as(F32), tensors)
    with pytest.raises(BrokenModel, match=r"1 tensors are missing: blk\.2\.attn_v\.weight"):
        load_weights(tmp_path / "tiny.gguf", spec, torch.float32)


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    write_gguf(tiny_model("qwen3"), tmp_path / "tiny.gguf", packed_as(F32))
    spec = read_spec(tmp_path / "tiny.gguf")
    expected = load(tmp_path / "tiny.gguf")
    assert_same(load_weights(tmp_path, spec, torch.float32), expected)
    write_gguf(tiny_model("qwen3"), tmp_path / "other.gguf", packed_as(F32))
    with pytest.raises(BrokenModel, match=r"contains 2 \.gguf files; give the path of one"):
        load_weights(tmp_path, spec, torch.float32)
