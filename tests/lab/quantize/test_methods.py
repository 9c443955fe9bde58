"""The methods on single matrices: at equal bits each loses less at the output than rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from ridgeline.lab.quantize.inputs import InputStatistics, input_rounding
from ridgeline.lab.quantize.methods import rtn as rounding
from ridgeline.lab.quantize.methods.awq import best_scales
from ridgeline.lab.quantize.methods.gptq import Gptq, inverse_factor
from ridgeline.lab.quantize.methods.hadamard import hadamard_matrix
from ridgeline.lab.quantize.methods.rtn import energy, output_error, rtn, values_of
from ridgeline.lab.quantize.methods.scalings import Scaling
from ridgeline.lab.quantize.methods.smoothquant import smoothing_scales
from ridgeline.models.quantized.format import MXFP4, NVFP4, fp8_format, int4_format, int8_format

FORMATS = {
    "int4": int4_format(32),
    "int4 with zero points": int4_format(32, zero_point=True),
    "int8": int8_format(),
    "fp8": fp8_format(),
    "fp8-block": fp8_format("block"),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}


def correlated(width: int = 192, tokens: int = 1500, seed: int = 0) -> torch.Tensor:
    """Inputs of fewer directions than channels, with channels of unequal size, as in a trained model."""
    random = torch.Generator().manual_seed(seed)
    directions = torch.randn(width // 4, width, generator=random)
    sizes = torch.exp(torch.randn(width, generator=random))
    mixed = torch.randn(tokens, width // 4, generator=random) @ directions
    return (mixed + 0.1 * torch.randn(tokens, width, generator=random)) * sizes


def matrix(rows: int = 160, width: int = 192, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def seen(inputs: torch.Tensor) -> InputStatistics:
    statistics = InputStatistics(inputs.shape[1], with_gram=True)
    for part in inputs.split(500):
        statistics.add(part)
    return statistics


@pytest.mark.parametrize("block", [64, 80, 512])
def test_the_energy_of_outputs_is_that_of_the_products(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that divide the width, that do not, and one larger than it."""
    monkeypatch.setattr(rounding, "GRAM_BLOCK", block)
    inputs, weights = correlated(), matrix()
    expected = float((inputs.double() @ weights.double().T).square().sum())
    assert energy(weights, seen(inputs).gram) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_gptq_loses_less_than_rounding_to_nearest(name: str, act_order: bool) -> None:
    inputs, weights, format = seen(correlated()), matrix(), FORMATS[name]
    nearest = output_error(weights, values_of(rtn(weights, format)), inputs)
    found = output_error(weights, values_of(Gptq(act_order=act_order)(weights, format, inputs)), inputs)
    assert 0 < found < 0.6 * nearest


def test_gptq_s_gain_holds_on_inputs_it_has_not_seen() -> None:
    every, weights, format = correlated(tokens=3000), matrix(), int4_format(64)
    fitted, others = seen(every[:1500]), every[1500:]

    def lost(values: torch.Tensor) -> float:
        return float((others @ (values - weights).T).square().sum())

    assert lost(values_of(Gptq()(weights, format, fitted))) < 0.6 * lost(values_of(rtn(weights, format)))


def test_gptq_without_inputs_rounds_to_nearest() -> None:
    weights, format = matrix(), int4_format(64)
    found = Gptq()(weights, format, None)
    assert (found.codes == rtn(weights, format).codes).all()


def test_gptq_computes_with_inputs_that_leave_channels_untouched() -> None:
    """Fewer tokens than channels, and a channel that is always 0: the correlations have no inverse."""
    inputs = correlated(tokens=20)
    inputs[:, 5] = 0
    weights, statistics = matrix(), seen(inputs)
    found = values_of(Gptq()(weights, int4_format(64), statistics))
    nearest = values_of(rtn(weights, int4_format(64)))
    assert torch.isfinite(found).all()
    assert output_error(weights, found, statistics) < output_error(weights, nearest, statistics)


def test_the_inverse_factor_is_that_of_the_damped_inverse() -> None:
    inputs = correlated(width=48)
    gram = (inputs.T @ inputs).double()
    factor = inverse_factor(gram.float(), 0.05).double()
    damped = gram + 0.05 * gram.diagonal().mean() * torch.eye(48, dtype=torch.float64)
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(48, dtype=torch.float64), atol=1e-3)


def test_awq_s_scales_lose_less_where_few_channels_have_large_inputs() -> None:
    inputs = torch.randn(1500, 192, generator=torch.Generator().manual_seed(3))
    inputs[:, ::48] *= 40
    weights, statistics, format = matrix(), seen(inputs), int4_format(64)
    scaling = Scaling([], [], [("qkv", None)], True)
    scales = best_scales([weights], statistics, format, scaling)
    assert scales is not None
    found = values_of(rtn(weights * scales, format)) / scales
    nearest = values_of(rtn(weights, format))
    assert output_error(weights, found, statistics) < 0.6 * output_error(weights, nearest, statistics)


def test_smoothquant_loses_less_where_inputs_have_outliers() -> None:
    inputs = torch.randn(600, 192, generator=torch.Generator().manual_seed(4))
    inputs[:, ::64] *= 60
    weights, format = matrix(), int8_format()
    rounded = input_rounding(format)
    assert rounded is not None
    exact = inputs @ weights.T

    def lost(x: torch.Tensor, w: torch.Tensor) -> float:
        return float((rounded(x) @ values_of(rtn(w, format)).T - exact).square().sum())

    scales = smoothing_scales(inputs.abs().amax(0), weights.abs().amax(0), 0.5)
    assert lost(inputs / scales, weights * scales) < 0.2 * lost(inputs, weights)


@pytest.mark.parametrize("size", [1, 2, 12, 20, 24, 28, 36, 64, 144, 576, 896, 960, 1536, 3072])
def test_hadamard_matrices_are_orthogonal_signs(size: int) -> None:
    found = hadamard_matrix(size)
    assert found is not None
    assert (found.abs() == 1).all()
    assert torch.equal(found @ found.T, size * torch.eye(size))


def test_a_size_without_a_known_hadamard_matrix_has_none() -> None:
    assert hadamard_matrix(18) is None
    assert hadamard_matrix(7 * 64) is not None  # 448 = 28 · 16
    assert hadamard_matrix(92) is None


def test_rounded_inputs_are_what_the_formats_say() -> None:
    x = torch.tensor([[1.0, -2.54, 0.004], [0.0, 0.0, 0.0]])
    integers = input_rounding(int8_format())
    assert integers is not None
    assert torch.allclose(integers(x), torch.tensor([[1.0, -2.54, 0.0], [0.0, 0.0, 0.0]]), atol=1e-6)
    floats = input_rounding(fp8_format())
    assert floats is not None
    assert torch.allclose(floats(x), x, rtol=2**-4, atol=1e-5)
    assert input_rounding(int4_format()) is None
