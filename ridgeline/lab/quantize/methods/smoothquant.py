"""SmoothQuant: moves a part of the inputs' outliers into the weights, before both are rounded to 8 bits.

After a norm, channel j is divided by sⱼ = max|xⱼ|^α / max|wⱼ|^(1-α) and its column multiplied by it (arXiv
2211.10438). α 0.5 shares the range evenly between inputs and weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.lab.quantize.checkpoint import Tensors
from ridgeline.lab.quantize.inputs import Statistics
from ridgeline.lab.quantize.methods.scalings import Scaling, positive


def smooth(scalings: list[Scaling], tensors: Tensors, statistics: Statistics, alpha: float) -> None:
    """Scales the layer's tensors in place."""
    for scaling in scalings:
        inputs = statistics.of(scaling.inputs[0]) if scaling.after_norm else None
        if inputs is not None:
            weights = torch.stack([tensors[name].abs().amax(0) for name in scaling.readers]).amax(0)
            scaling.apply(tensors, statistics, smoothing_scales(inputs.abs_max, weights, alpha))


def smoothing_scales(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """[channels], from the largest magnitudes of each channel's inputs and weights."""
    return positive(inputs.pow(alpha) / weights.pow(1 - alpha))
