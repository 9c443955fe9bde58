"""What the matrices of a layer read: their inputs' correlations and ranges, and their inputs rounded.

`ObservingOps` is a backend of the torch decoder that hands every matrix's input to an observer and can round
it as the target format says. `InputStatistics` is what methods learn from: it does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.weights.torch_weights import LayerTensors
from ridgeline.ops import reference, torch_backend
from ridgeline.ops.input_rounding import round_inputs

Key = tuple[str, int | None]  # a field of LayerWeights, and the expert of a stack
_MATRICES = ("qkv", "o", "gate_up", "up", "down", "router", "shared_scale")
_STACKS = ("experts_gate_up", "experts_down")


@dataclass(slots=True)
class InputStatistics:
    """Of all vectors x that a matrix has read.

    gram:     Σ x xᵀ, [in, in]; None if no method asks for it
    abs_sum:  Σ |x|, [in]
    abs_max:  max |x|, [in]
    """

    width: int
    with_gram: bool
    tokens: int = 0
    gram: Tensor | None = None
    abs_sum: Tensor = field(init=False)
    abs_max: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.abs_sum, self.abs_max = torch.zeros(self.width), torch.zeros(self.width)
        if self.with_gram:
            self.gram = torch.zeros(self.width, self.width)

    def add(self, x: Tensor) -> None:
        if not len(x):
            return
        sizes = x.abs()
        self.tokens += len(x)
        self.abs_sum += sizes.sum(0)
        self.abs_max = torch.maximum(self.abs_max, sizes.amax(0))
        if self.gram is not None:
            self.gram.addmm_(x.T, x)

    def divide(self, scales: Tensor) -> None:
        """The statistics of x / scales."""
        self.abs_sum /= scales
        self.abs_max /= scales
        if self.gram is not None:
            self.gram /= torch.outer(scales, scales)


class Statistics:
    """InputStatistics by matrix."""

    def __init__(self, with_gram: bool) -> None:
        self._with_gram = with_gram
        self._found: dict[Key, InputStatistics] = {}

    def observe(self, key: Key, x: Tensor) -> None:
        if key not in self._found:
            self._found[key] = InputStatistics(x.shape[1], self._with_gram)
        self._found[key].add(x)

    def of(self, key: Key) -> InputStatistics | None:
        """None: no token has reached the matrix, as with an expert that is never chosen."""
        found = self._found.get(key)
        return found if found is not None and found.tokens else None


class ObservingOps:
    """A Backend. `watch` says which tensors are which matrices of the layer that is computed next."""

    NAME = "observing"

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._observe: Callable[[Key, Tensor], None] | None = None
        self._rounded: Collection[Key] = ()
        self._round: Callable[[Tensor], Tensor] | None = None
        self.gated_mlp = partial(reference.gated_mlp, product=self.linear)
        self.mlp = partial(reference.mlp, product=self.linear)
        self.experts = partial(reference.experts, product=self.linear)

    def __getattr__(self, name: str) -> Any:  # every op without a matrix
        return getattr(torch_backend, name)

    def watch(
        self,
        layer: LayerTensors,
        observe: Callable[[Key, Tensor], None] | None = None,
        rounded: Collection[Key] = (),
        format: QuantFormat | None = None,
    ) -> None:
        """rounded: the matrices whose inputs are rounded as the format says, if it says so."""
        self._keys = {tensor.data_ptr(): key for key, tensor in matrices_of(layer).items()}
        self._observe, self._rounded = observe, rounded
        self._round = None if format is None else input_rounding(format)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        key = self._keys.get(weight.data_ptr())
        if key is not None and self._observe is not None:
            self._observe(key, x)
        if self._round is not None and key in self._rounded:
            x = self._round(x)
        return reference.linear(x, weight, bias)


def matrices_of(layer: LayerTensors) -> dict[Key, Tensor]:
    found: dict[Key, Tensor] = {}
    for name in _MATRICES:
        if isinstance(tensor := getattr(layer, name), Tensor):
            found[name, None] = tensor
    for name in _STACKS:
        if isinstance(stack := getattr(layer, name), Tensor):
            found |= {(name, expert): stack[expert] for expert in range(len(stack))}
    return found


def input_rounding(format: QuantFormat) -> Callable[[Tensor], Tensor] | None:
    """The rounding of inputs that the format's readers apply; None: they stay as they are."""
    inputs = format.activations
    if inputs is None:
        return None
    return partial(round_inputs, element=inputs.element, group=inputs.group, scale=inputs.scale)
