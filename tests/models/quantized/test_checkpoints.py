"""A quantized checkpoint is the float checkpoint with its dequantized weights: every layout, two backends.

torch loads the same numbers. The native library packs the same numbers where one of its formats holds them,
and says where it rounds.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.packed import PackedDecoder, load_packed
from ridgeline.models.weights.shards import Rank
from ridgeline.models.weights.stream import stream_weights
from ridgeline.models.weights.torch_weights import Weights, load_weights
from ridgeline.ops.cpu.library import Format, unpack
from tests.models.quantized.writers import LAYOUTS, write_quantized
from tests.models.tiny_checkpoints import tiny_model

# The packed format of the layers' matrices, and the words of the note about them.
PACKED = {
    "fp8-block": (Format.BF16, "FP8 (blocks of 32×48) are rounded to bfloat16"),
    "fp8-channel": (Format.F8, "FP8 (a scale per row) are repacked, with the same values, as FP8"),
    "fp8-tensor": (Format.F8, "FP8 (one scale) are repacked, with the same values, as FP8"),
    "modelopt-fp8": (Format.F8, "FP8 (one scale) are repacked, with the same values, as FP8"),
    "modelopt-nvfp4": (Format.Q8_H, "NVFP4 (groups of 16) are rounded to int8"),
    "nvfp4": (Format.Q8_H, "NVFP4 (groups of 16) are rounded to int8"),
    "mxfp4": (Format.Q8_H, "MXFP4 (groups of 32) are expanded"),
    "int8": (Format.Q8_H, "int8 (a scale per row) are repacked, with the same values, as int8"),
    "int8-float32-scales": (Format.Q8_H, "repacked, with scales rounded to float16, as int8"),
    "int4": (Format.Q4_H, "int4 (groups of 32) are repacked, with the same values, as int4 (Q4_0)"),
    "int4-zeros": (
        Format.Q4_Z,
        "int4 (groups of 32, zero points) are repacked, with the same values, as int4 with zero points",
    ),
    "gptq": (Format.Q4_H, "repacked, with the same values, as int4 (Q4_0)"),
    "gptq-v2-zeros": (Format.Q4_Z, "repacked, with the same values, as int4 with zero points"),
    "gptq-act-order": (Format.Q8_H, "are rounded to int8"),
    "awq": (Format.Q4_Z, "repacked, with the same values, as int4 with zero points"),
    "bnb-nf4": (Format.Q8_H, "NF4 (groups of 32) are rounded to int8"),
    "bnb-int8": (Format.Q8_H, "repacked, with scales rounded to float16, as int8"),
}
# Of a row's largest weight, where packing rounds: a half-precision scale, bfloat16, and 8 bits.
TOLERANCES = {"scales": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 250}
EXPERTS = ("fp8-block", "modelopt-nvfp4", "int4", "gptq-act-order", "awq")
CASES = (
    [("qwen3", name) for name in LAYOUTS]
    + [("qwen3-moe", name) for name in EXPERTS]
    + [("phi3", "fp8-block")]
)


@cache
def saved(model: str, folder: Path) -> Path:
    path = folder / model
    tiny_model(model).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def pair(request: pytest.FixtureRequest, models: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(quantized checkpoint, its twin in float32)"""
    model, layout = request.param
    folder, twin = tmp_path / "quantized", tmp_path / "twin"
    assert write_quantized(saved(model, models), folder, twin, LAYOUTS[layout]) >= 12
    return folder, twin


def every_tensor(weights: Weights) -> dict[str, torch.Tensor]:
    found = {"embed": weights.embed.tensor, "lm_head": weights.lm_head.tensor}
    for number, layer in enumerate(weights.layers):
        for name in layer.__slots__:
            held = getattr(layer, name)
            if held is not None:
                found[f"{number}.{name}"] = held if isinstance(held, torch.Tensor) else held.tensor
    return found


def packed(path: Path, weights: str = "auto") -> PackedDecoder:
    return load_packed(path, read_spec(path), weights, keep=False)


def layer_matrices(decoder: PackedDecoder) -> dict[str, np.ndarray]:
    names = [s.name for s in decoder.image.header.sections if s.k and s.name.startswith("layers.")]
    return {name: unpack(decoder.image.matrix(name)) for name in names if not name.endswith("router")}


@pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
def test_torch_loads_the_dequantized_weights(pair: tuple[Path, Path]) -> None:
    folder, twin = pair
    check_servable(read_spec(folder))
    ours = every_tensor(load_weights(folder, read_spec(folder), torch.float32))
    theirs = every_tensor(load_weights(twin, read_spec(twin), torch.float32))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(("pair", "layout"), [(case, case[1]) for case in CASES], indirect=["pair"], ids=str)
def test_the_native_library_packs_the_same_weights_or_says_what_it_rounds(
    pair: tuple[Path, Path], layout: str
) -> None:
    folder, twin = pair
    decoder = packed(folder)
    format, words = PACKED[layout]
    assert any(words in note for note in decoder.notes), decoder.notes
    expected = layer_matrices(packed(twin, "float32"))
    found = layer_matrices(decoder)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        if layout in ("gptq-act-order", "fp8-block") and values.shape[1] == 32:  # one group, or one block
            assert np.array_equal(values, expected[name])
            continue
        assert decoder.image.matrix(name).format == format
        if "same values" in words or "expanded" in words:
            assert np.array_equal(values, expected[name]), name
            continue
        kind = next(kind for kind in TOLERANCES if kind in words)
        largest = np.abs(expected[name]).max(axis=1, keepdims=True)
        assert (np.abs(values - expected[name]) <= TOLERANCES[kind] * largest).all(), name


@pytest.mark.parametrize(
    "pair", [("qwen3", "gptq-act-order"), ("qwen3", "fp8-block")], indirect=True, ids="-".join
)
def test_asked_for_float32_nothing_is_rounded(pair: tuple[Path, Path]) -> None:
    ours, theirs = (layer_matrices(packed(path, "float32")) for path in pair)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("pair", [("qwen3", "awq"), ("qwen3", "gptq-v2-zeros")], indirect=True, ids="-".join)
def test_asked_for_int4_codes_with_zero_points_are_kept(pair: tuple[Path, Path]) -> None:
    """Not quantized again."""
    folder, twin = pair
    decoder = packed(folder, "int4")
    expected = layer_matrices(packed(twin, "float32"))
    for name, values in layer_matrices(decoder).items():
        assert decoder.image.matrix(name).format == Format.Q4_Z
        assert np.array_equal(values, expected[name]), name


@pytest.mark.parametrize("pair", [("qwen3", "int4"), ("qwen3", "fp8-block")], indirect=True, ids="-".join)
def test_streamed_weights_and_shards_are_those_of_the_twin(pair: tuple[Path, Path]) -> None:
    """The GPU's loader, and both shards of two processes: columns are cut after dequantization."""
    for rank in (Rank(), Rank(0, 2), Rank(1, 2)):
        ours, theirs = (
            every_tensor(stream_weights(path, read_spec(path), torch.bfloat16, device="cpu", rank=rank))
            for path in pair
        )
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), (name, rank)


# ---- what is wrong is said ----


@pytest.mark.parametrize("pair", [("qwen3", "gptq")], indirect=True, ids="-".join)
def test_a_bias_of_zeros_beside_a_gptq_matrix_is_no_tensor_of_the_model(pair: tuple[Path, Path]) -> None:
    folder, _ = pair
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.bias"))
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BrokenModel, match=name):
        load_weights(folder, read_spec(folder), torch.float32)


@pytest.mark.parametrize("pair", [("qwen3", "int4")], indirect=True, ids="-".join)
def test_a_matrix_that_the_settings_leave_out_must_not_be_quantized(pair: tuple[Path, Path]) -> None:
    folder, _ = pair
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.1.self_attn.q_proj")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BrokenModel, match=r"layers\.1\.self_attn\.q_proj is quantized"):
        load_weights(folder, read_spec(folder), torch.float32)


@pytest.mark.parametrize("pair", [("qwen3", "fp8-channel")], indirect=True, ids="-".join)
def test_a_scale_that_is_not_finite_is_refused_by_name(pair: tuple[Path, Path]) -> None:
    folder, _ = pair
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight_scale"))
    tensors[name][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    for load in (lambda: load_weights(folder, read_spec(folder), torch.float32), lambda: packed(folder)):
        with pytest.raises(BrokenModel, match=r"down_proj has scales that are not finite"):
            load()


@pytest.mark.parametrize("pair", [("qwen3", "int4")], indirect=True, ids="-".join)
def test_the_tensors_of_a_matrix_may_be_in_different_files(pair: tuple[Path, Path]) -> None:
    folder, _ = pair
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    ours, theirs = (every_tensor(load_weights(path, read_spec(path), torch.float32)) for path in pair)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("ignore", [[], ["re:.*experts.*"]], ids=["quantized", "left out"])
def test_a_quantized_stack_of_experts_is_refused_before_the_weights(
    ignore: list[str], models: Path, tmp_path: Path
) -> None:
    """Llama 4's experts are one tensor; tools write them one by one, in a layout that is not read."""
    config = json.loads((saved("llama4", models) / "config.json").read_text())
    config["quantization_config"] = {**LAYOUTS["fp8-channel"].config, "ignore": ignore}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path / "config.json")
    if ignore:
        check_servable(spec)
        return
    with pytest.raises(UnsupportedModel, match="experts quantized by compressed-tensors are not read"):
        check_servable(spec)


def test_settings_that_are_not_read_are_refused_before_the_weights(models: Path, tmp_path: Path) -> None:
    config = json.loads((saved("qwen3", models) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="AQLM's codebooks"):
        check_servable(read_spec(tmp_path / "config.json"))
