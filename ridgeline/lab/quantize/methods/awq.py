"""AWQ: scales up the columns that read large inputs, so that rounding to few bits loses less of them.

The scale of channel j is mean|xⱼ|^r, and r is searched from 0 to 1 for the least error at the output of the
matrices that read the channel (arXiv 2306.00978). r 0 leaves the weights as they are: the search never ends
with more error than round-to-nearest has on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.lab.quantize.checkpoint import Tensors
from ridgeline.lab.quantize.inputs import InputStatistics, Statistics
from ridgeline.lab.quantize.methods.rtn import energy, rtn, values_of
from ridgeline.lab.quantize.methods.scalings import Scaling, positive
from ridgeline.models.quantized.format import QuantFormat

RATIOS = tuple(step / 20 for step in range(20))


def scale_by_activations(
    scalings: list[Scaling],
    tensors: Tensors,
    statistics: Statistics,
    format: QuantFormat,
    is_quantized: Callable[[str], bool],
) -> None:
    """Scales the layer's tensors in place."""
    for scaling in scalings:
        inputs = statistics.of(scaling.inputs[0])
        matrices = [tensors[name] for name in scaling.readers if is_quantized(name)]
        if inputs is not None and matrices:
            scales = best_scales(matrices, inputs, format, scaling)
            if scales is not None:
                scaling.apply(tensors, statistics, scales)


def best_scales(
    matrices: list[Tensor], inputs: InputStatistics, format: QuantFormat, scaling: Scaling
) -> Tensor | None:
    """[channels made]; None: no ratio is better than none at all."""
    sizes = scaling.made(inputs.abs_sum / inputs.tokens)
    least, best = torch.inf, None
    for ratio in RATIOS:
        scales = positive(sizes.pow(ratio))
        scales = scales / (scales.max() * scales.min()).sqrt()
        wide = scaling.read(scales)
        lost = sum(_lost(matrix, wide, inputs, format) for matrix in matrices)
        if lost < least:
            least, best = lost, scales if ratio else None
    return best


def _lost(matrix: Tensor, scales: Tensor, inputs: InputStatistics, format: QuantFormat) -> float:
    """Σ |(rounded - exact) x|²"""
    assert inputs.gram is not None
    return energy(values_of(rtn(matrix * scales, format)) / scales - matrix, inputs.gram)
