"""Rounded inputs: the torch reference against the definition of the formats, and stored scales of inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.engine.start.loading import input_notes
from ridgeline.models.errors import BrokenModel
from ridgeline.models.quantized.config import QuantScheme
from ridgeline.models.quantized.format import (
    MXFP4,
    NVFP4,
    InputFormat,
    QuantFormat,
    fp8_format,
    int8_format,
)
from ridgeline.models.quantized.matrix import dequantize
from ridgeline.models.quantized.packings import StoredTensor
from ridgeline.models.quantized.rounding import quantize
from ridgeline.models.quantized.tensors import QuantizedTensors
from ridgeline.ops.input_rounding import LARGEST, round_inputs
from tests.models.quantized.test_golden import stored_tensors

MXFP8 = QuantFormat("e4m3", "group", (1, 32), "e8m0")


def inputs_of(tokens: int = 12, columns: int = 256) -> Any:
    """Tokens of very different size, with outliers and a token of zeros."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(tokens, columns)) * np.exp(draw.normal(size=(tokens, 1)) * 3)
    x[:, 5] *= 40
    x[3] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        (QuantFormat("e4m3", "channel", (1, 0)), {}),
        (QuantFormat("e4m3", "group", (1, 128)), {"group": 128}),
        (MXFP8, {"group": 32, "scale": "e8m0"}),
        (MXFP4, {"group": 32, "scale": "e8m0"}),
        (NVFP4, {"group": 16, "scale": "e4m3"}),
    ],
    ids=str,
)
def test_inputs_are_rounded_as_a_matrix_of_the_same_format(
    format: QuantFormat, options: dict[str, Any]
) -> None:
    """`models.quantized.rounding` gives the bytes of compressed-tensors; this is its definition in torch."""
    x = inputs_of()
    made = quantize(x, format)
    stored = made.tensor_scale if format.tensor_scale else None
    found = round_inputs(torch.from_numpy(x), format.element, stored=stored, **options)
    np.testing.assert_allclose(found.numpy(), dequantize(made), rtol=1e-6, atol=1e-30)


def test_int8_inputs_have_the_largest_of_a_token_as_127() -> None:
    x = inputs_of()
    found = round_inputs(torch.from_numpy(x), "int8").numpy()
    steps = np.abs(x).max(1, keepdims=True) / 127
    assert (np.abs(found - x) <= 0.5001 * steps).all()
    np.testing.assert_array_equal(found[3], 0)
    np.testing.assert_allclose(np.abs(found).max(1), np.abs(x).max(1), rtol=1e-6)


@pytest.mark.parametrize("element", ["e4m3", "int8"])
def test_a_stored_step_is_that_of_every_token_and_larger_inputs_saturate(element: str) -> None:
    x = torch.from_numpy(inputs_of())
    step = 0.01
    found = round_inputs(x, element, stored=step)
    most = LARGEST[element] * step
    assert float(found.abs().max()) == pytest.approx(most)
    beyond = x.abs() > most
    assert beyond.any()
    assert (found[beyond].abs() == found.abs().max()).all()
    alone = torch.cat([round_inputs(x[at : at + 1], element, stored=step) for at in range(len(x))])
    assert torch.equal(alone, found)


def test_an_incomplete_last_group_has_its_own_step() -> None:
    x = torch.from_numpy(inputs_of(columns=160))
    found = round_inputs(x, "e4m3", group=128)
    assert torch.equal(found[:, :128], round_inputs(x[:, :128].contiguous(), "e4m3"))
    assert torch.equal(found[:, 128:], round_inputs(x[:, 128:].contiguous(), "e4m3"))


# ---- scales of inputs in files ----


def tensors_with(format: QuantFormat, parts: dict[str, StoredTensor]) -> QuantizedTensors:
    named = {f"layer.{part}": tensor for part, tensor in parts.items()}
    return QuantizedTensors(QuantScheme("test", default=format), named, named.__getitem__, "file")


def one(*values: float) -> StoredTensor:
    data = np.array(values, np.float32)
    return StoredTensor("F32", data.shape, data.view(np.uint8))


STATIC = fp8_format("tensor", static=True)
FOUR_BITS = replace(NVFP4, activations=InputFormat("e2m1", 16, "e4m3", static=True))


def test_the_scale_that_modelopt_wrote_is_read() -> None:
    parts, _ = stored_tensors("modelopt_fp8")
    found = tensors_with(STATIC, parts)
    assert found.input_scale("layer.weight") == pytest.approx(float(parts["input_scale"].floats()))
    assert "layer.input_scale" in found.taken  # a reader of weights does not trip over it
    assert tensors_with(fp8_format("tensor"), parts).input_scale("layer.weight") is None


def test_a_global_scale_of_compressed_tensors_is_an_inverse() -> None:
    found = tensors_with(FOUR_BITS, {"weight_packed": one(0), "input_global_scale": one(4.0)})
    assert found.input_scale("layer.weight") == 0.25


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "layer has no input_scale"),
        ({"input_scale": one(0.0)}, "layer.input_scale is not one positive number"),
        ({"input_scale": one(1.0, 2.0)}, "layer.input_scale is not one positive number"),
        ({"input_scale": one(float("nan"))}, "layer.input_scale is not one positive number"),
    ],
)
def test_a_static_scale_that_is_missing_or_wrong_is_refused_by_name(
    parts: dict[str, StoredTensor], words: str
) -> None:
    with pytest.raises(BrokenModel, match=words):
        tensors_with(STATIC, parts).input_scale("layer.weight")


def test_the_start_says_that_static_scales_are_not_used() -> None:
    class Spec:
        def __init__(self, format: QuantFormat | None) -> None:
            self.quantization = None if format is None else QuantScheme("test", default=format)

    static, dynamic, none = (input_notes(Spec(one)) for one in (STATIC, int8_format(), None))  # type: ignore[arg-type]
    assert static[0].endswith("as the file asks; its static scales of inputs are not used")
    assert dynamic[0].endswith("inputs are not rounded to int8, as the file asks")
    assert none == ()
