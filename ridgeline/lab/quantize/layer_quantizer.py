"""A layer's float tensors become a quantized layer: scaling, then rounding, as --method says.

Called by the driver and by the scan, a layer at a time. What a method needs to know of the inputs is in
`Statistics`; nothing here runs the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.lab.quantize.checkpoint import Checkpoint, Tensors
from ridgeline.lab.quantize.inputs import Key, Statistics
from ridgeline.lab.quantize.keep import KeepPolicy
from ridgeline.lab.quantize.methods.awq import scale_by_activations
from ridgeline.lab.quantize.methods.gptq import Gptq
from ridgeline.lab.quantize.methods.rtn import Rounding, output_error, rtn, values_of
from ridgeline.lab.quantize.methods.scalings import scalings_of
from ridgeline.lab.quantize.methods.smoothquant import smooth
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.lab.quantize.tensor_types import as_stored
from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.quantized.matrix import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """matrices: by stored name; values: every tensor of the layer as a reader of the file computes with it;
    errors: of each matrix's output alone, where its inputs are known; unseen: matrices without any input."""

    matrices: dict[str, QuantizedMatrix]
    values: Tensors
    errors: dict[str, float]
    unseen: list[str]


class LayerQuantizer:
    def __init__(
        self, checkpoint: Checkpoint, format: QuantFormat, options: QuantizeOptions, keep: KeepPolicy
    ) -> None:
        self._checkpoint, self._format, self._options, self._keep = checkpoint, format, options, keep
        self._round: Rounding = (
            Gptq(options.damping, options.act_order) if options.rounding == "gptq" else rtn
        )

    @property
    def needs_inputs(self) -> bool:
        return self._options.rounding == "gptq" or bool(self._options.scaling)

    @property
    def needs_gram(self) -> bool:
        return self._options.rounding == "gptq" or self._options.scaling == "awq"

    def rounded_inputs(self, number: int) -> frozenset[Key]:
        """The layer's matrices whose inputs the format rounds: those with a quantized part."""
        names = (name for name in self._checkpoint.names(number) if self._keep.is_quantized(name))
        return frozenset(self._key(name) for name in names)

    def quantize(self, number: int, tensors: Tensors, statistics: Statistics) -> QuantizedLayer:
        """tensors: the layer in float32; scaled in place."""
        scalings = scalings_of(self._checkpoint, number) if self._options.scaling else []
        if self._options.scaling == "awq":
            scale_by_activations(scalings, tensors, statistics, self._format, self._keep.is_quantized)
        elif self._options.scaling == "smoothquant":
            smooth(scalings, tensors, statistics, self._options.alpha)
        largest = self._largest(tensors) if self._format.tensor_scale else {}
        matrices: dict[str, QuantizedMatrix] = {}
        values: Tensors = {}
        errors: dict[str, float] = {}
        unseen: list[str] = []
        for name, tensor in tensors.items():
            if not self._keep.is_quantized(name):
                values[name] = as_stored(tensor, self._checkpoint.stored(name).dtype)
                continue
            key = self._key(name)
            inputs = statistics.of(key)
            matrices[name] = self._round(tensor, self._format, inputs, largest.get(key))
            values[name] = values_of(matrices[name])
            if inputs is not None and inputs.gram is not None:
                errors[name] = output_error(tensor, values[name], inputs)
            elif self.needs_inputs and inputs is None:
                unseen.append(name)
        return QuantizedLayer(matrices, values, errors, unseen)

    def _largest(self, tensors: Tensors) -> dict[Key, float]:
        """Magnitudes of matrices that engines join into one product (q, k, v; gate, up): a joined matrix has
        one tensor scale."""
        found: dict[Key, float] = {}
        for name in filter(self._keep.is_quantized, tensors):
            key = self._key(name)
            found[key] = max(found.get(key, 0.0), float(tensors[name].abs().max()))
        return found

    def _key(self, name: str) -> Key:
        piece = self._checkpoint.pieces(name)[0].piece
        return piece.field, piece.expert
