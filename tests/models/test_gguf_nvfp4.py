"""GGUF's NVFP4 tensors and the factors beside them: of the whole tensor, or of each expert of a stack."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.gguf_output.write import write_gguf as rewrite_gguf
from ridgeline.models.weights.dequant import dequantize
from tests.models.test_dequant import random_blocks
from tests.models.test_packed import matrices, pack, torch_weights
from tests.models.tiny_checkpoints import gguf_tensors, tiny_model, write_gguf

KIND, GROUP = GGMLQuantizationType.NVFP4, 64
Arrays = dict[str, np.ndarray]


def write(path: Path, name: str, changes: Arrays | None = None) -> Arrays:
    """A file with random NVFP4 matrices and a factor for most of them; their values, by the gguf package."""
    model = tiny_model(name)
    tensors = gguf_tensors(model)
    values: Arrays = {}
    factors: Arrays = {}
    rng = np.random.default_rng(11)
    for tensor, floats in tensors.items():
        if "blk" in tensor and floats.ndim > 1 and floats.shape[-1] % GROUP == 0 and "gate_inp" not in tensor:
            experts = floats.shape[0] if floats.ndim == 3 else 1
            if "attn_v" not in tensor:  # a converter leaves out factors of 1
                stem = tensor.removesuffix(".weight")
                factors[f"{stem}.scale"] = rng.uniform(0.25, 2, experts).astype(np.float32)
                factors[f"{stem}.input_scale"] = np.ones(experts, np.float32)
            blocks = random_blocks("NVFP4", floats.size // GROUP, seed=len(tensor))
            blocks[:, :4] = rng.integers(8, 32, (len(blocks), 4))  # 2^-6 to 2^-3
            values[tensor] = blocks.reshape(*floats.shape[:-1], -1)

    def packed(tensor: str, floats: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        return (values[tensor], KIND) if tensor in values else (floats, GGMLQuantizationType.F32)

    write_gguf(model, path, packed, {**tensors, **factors, **(changes or {})})
    expected: Arrays = {}
    for tensor, blocks in values.items():
        factor = factors.get(f"{tensor.removesuffix('.weight')}.scale", np.ones(1, np.float32))
        whole = gguf.quants.dequantize(blocks, KIND)
        expected[tensor] = whole * factor.reshape(-1, *[1] * (whole.ndim - 1))
    return expected


def test_a_tensors_factor_multiplies_its_values(tmp_path: Path) -> None:
    expected = write(tmp_path / "tiny.gguf", "qwen3-wide")
    (layer,) = torch_weights(tmp_path / "tiny.gguf").layers
    for field, parts in (
        ("qkv", ("attn_q", "attn_k", "attn_v")),
        ("o", ("attn_output",)),
        ("gate_up", ("ffn_gate", "ffn_up")),
        ("down", ("ffn_down",)),
    ):
        wanted = np.concatenate([expected[f"blk.0.{part}.weight"] for part in parts])
        assert np.array_equal(getattr(layer, field).numpy(), wanted), field


def test_each_expert_has_its_own_factor(tmp_path: Path) -> None:
    expected = write(tmp_path / "tiny.gguf", "qwen3-moe")
    layers = torch_weights(tmp_path / "tiny.gguf").layers
    for number, layer in enumerate(layers):
        parts = [expected[f"blk.{number}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
        assert np.array_equal(layer.experts_gate_up.numpy(), np.concatenate(parts, axis=1))


def test_the_native_library_packs_the_values_with_their_factors(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "qwen3-wide")
    expected = torch_weights(tmp_path / "tiny.gguf")
    for name, (ours, theirs) in matrices(pack(tmp_path / "tiny.gguf", "float32"), expected).items():
        assert np.array_equal(ours[: len(theirs)], theirs), name
    packed = pack(tmp_path / "tiny.gguf")
    assert "7 tensors stored as NVFP4 are rounded to int8" in packed.image.header.notes


def test_a_file_written_from_it_has_the_values_and_no_factors(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    expected = write(source, "qwen3-wide")
    rewrite_gguf(source, "f32", tmp_path / "out.gguf", requantize=True)
    written = GgufFile(tmp_path / "out.gguf")
    assert not [name for name in written.tensors if name.endswith("scale")]
    for name, values in expected.items():
        found = dequantize(written.raw(name), written.tensors[name].type)
        assert np.array_equal(found.reshape(values.shape), values), name


@pytest.mark.parametrize("factors", [[1.0, 2.0], [float("nan")]])
def test_factors_that_do_not_fit_are_refused_by_name(tmp_path: Path, factors: list[float]) -> None:
    wrong = {"blk.0.ffn_down.scale": np.array(factors, np.float32)}
    write(tmp_path / "tiny.gguf", "qwen3-wide", wrong)
    with pytest.raises(BrokenModel, match=r"blk\.0\.ffn_down\.scale is not one finite float32"):
        torch_weights(tmp_path / "tiny.gguf")
