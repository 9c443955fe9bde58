"""safetensors files are read as the safetensors package reads them; what it refuses is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.safetensors_file import SafetensorsFile
from ridgeline.models.weights.dequant import dequantize


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: list[Any] | None = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_of_every_width_equal_torchs(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {
        "odd": torch.ones(3, dtype=torch.uint8),  # what follows it is not aligned to its own size
        "matrix": torch.randn(37, 19).to(dtype),
        "tiny": torch.tensor([6e-8, 1e-5, -0.0, 65504.0]).to(dtype),
    }
    save_file(stored, tmp_path / "f.safetensors")
    file = SafetensorsFile(tmp_path / "f.safetensors")
    assert set(file.tensors) == set(stored)
    for name in ("matrix", "tiny"):
        tensor = file.tensors[name]
        assert tensor.shape == tuple(stored[name].shape)
        values = dequantize(file.raw(name), tensor.dtype).reshape(tensor.shape)
        expected = stored[name].to(torch.float32).numpy()
        assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_a_file_without_tensors_and_an_empty_tensor_are_whole_files(tmp_path: Path) -> None:
    assert SafetensorsFile(write(tmp_path / "none", {}, b"")).tensors == {}
    file = SafetensorsFile(write(tmp_path / "zero", {"a": entry(0, 0, shape=[0, 7])}, b""))
    assert file.tensors["a"].shape == (0, 7)
    assert file.raw("a").size == 0


FOUR_FLOATS = bytes(16)


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        (b"{", FOUR_FLOATS, "header is not valid JSON"),
        (b"[" * 5000, FOUR_FLOATS, "header is not valid JSON"),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":1}', FOUR_FLOATS, "a duplicate key"),
        ([], FOUR_FLOATS, "not a JSON object"),
        ({"a": 7}, FOUR_FLOATS, "tensor a has an invalid description"),
        ({"a": {"dtype": "F32", "shape": [4]}}, FOUR_FLOATS, "tensor a has an invalid description"),
        ({"a": entry(0, 16, shape=[-4])}, FOUR_FLOATS, "tensor a has an invalid description"),
        ({"a": entry(0, 16, shape=[4.0])}, FOUR_FLOATS, "tensor a has an invalid description"),
        ({"a": entry(0, 16, shape=[True, 4])}, FOUR_FLOATS, "tensor a has an invalid description"),
        ({"a": entry(16, 0)}, FOUR_FLOATS, "tensor a has an invalid description"),
        ({"a": entry(0, 16, shape=[5])}, FOUR_FLOATS, "has 16 bytes, but F32 .* needs 20"),
        ({"a": entry(0, 16, shape=[2**62, 4])}, FOUR_FLOATS, "has 16 bytes"),
        ({"a": entry(0, 32)}, FOUR_FLOATS, "tensors end at byte"),
        ({"a": entry(0, 8)}, FOUR_FLOATS, "tensors end at byte"),
        ({"a": entry(4, 16)}, FOUR_FLOATS, "tensor a begins at byte"),
        ({"a": entry(0, 12), "b": entry(8, 16)}, FOUR_FLOATS, "tensor b begins at byte"),
        ({"a": entry(0, 16), "b": entry(0, 16)}, FOUR_FLOATS, "tensor b begins at byte"),
    ],
)
def test_what_the_format_forbids_is_refused_by_both(
    header: Any, data: bytes, complaint: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "f.safetensors", header, data)
    with pytest.raises(BrokenModel, match=rf"f\.safetensors: is not a complete .*{complaint}"):
        SafetensorsFile(path)
    with pytest.raises(SafetensorError):
        safe_open(path, framework="np")


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(BrokenModel, match="its header should have 1152921504606846976 bytes"):
        SafetensorsFile(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"absent\.safetensors: the file is missing"):
        SafetensorsFile(tmp_path / "absent.safetensors")
