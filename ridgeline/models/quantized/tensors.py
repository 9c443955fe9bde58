"""Finds the quantized matrices among a file's tensors, each as one named like an unquantized weight.

`module.weight_packed`, `module.weight_scale` and the rest become one matrix `module.weight`. A tensor with a
float type and no scale is not quantized, whatever the settings say: settings seldom list every exception.
Called by `weights.safetensors_source`; opens no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ridgeline.models.errors import BrokenModel
from ridgeline.models.quantized.config import QuantScheme
from ridgeline.models.quantized.packings import TENSORS, UNREAD, StoredMatrix, StoredTensor

_EVERY = [names for needed, optional in TENSORS.values() for names in (*needed, *optional)]
_PARTS = tuple({name for names in _EVERY for name in names.split("|")})
# A module with one of these is quantized.
_SIGNS = frozenset({"weight_packed", "weight_scale", "weight_scale_inv", "qweight", "weight.absmax", "SCB"})


class QuantizedTensors:
    """The quantized matrices of a checkpoint.

    taken:  the names of the tensors that they consist of, and of those that are not needed
    """

    def __init__(
        self, scheme: QuantScheme, names: Iterable[str], load: Callable[[str], StoredTensor], where: str
    ) -> None:
        self._scheme = scheme
        self._load = load
        self._where = where
        modules: dict[str, dict[str, str]] = {}
        unread: set[str] = set()
        for name in names:
            if name.rpartition(".")[2] in UNREAD:
                unread.add(name)
            elif part := next((part for part in _PARTS if name.endswith("." + part)), ""):
                modules.setdefault(name.removesuffix("." + part), {})[part] = name
        self._modules = {module: parts for module, parts in modules.items() if parts.keys() & _SIGNS}
        self._unread = unread
        self.taken = unread.union(*(parts.values() for parts in self._modules.values()))
        self._matrices: dict[str, StoredMatrix] = {}

    def names(self) -> list[str]:
        return [f"{module}.weight" for module in self._modules]

    def elements(self, name: str) -> str:
        """The name of the tensor that has the elements of a matrix."""
        parts = self._modules[name.removesuffix(".weight")]
        return next(parts[part] for part in ("weight_packed", "qweight", "weight") if part in parts)

    def matrix(self, name: str) -> StoredMatrix | None:
        """The matrix of this name; None if it is not quantized. BrokenModel if its tensors do not fit."""
        if name not in self._matrices:
            module = name.removesuffix(".weight")
            if module not in self._modules or module == name:
                return None
            self._matrices[name] = self._made(module)
        return self._matrices[name]

    def input_scale(self, name: str) -> float | None:
        """The static factor of a matrix's inputs; None if they have none. BrokenModel if it is missing.

        No backend uses it: it is for references of kernels that round inputs.
        """
        module = name.removesuffix(".weight")
        format = self._scheme.format_of(module)
        if format is None or format.activations is None or not format.activations.static:
            return None
        for part, is_inverse in (("input_scale", False), ("input_global_scale", True)):
            if f"{module}.{part}" in self._unread:
                values = self._load(f"{module}.{part}").floats().reshape(-1)
                if values.size != 1 or not values[0] > 0 or not math.isfinite(values[0]):
                    raise BrokenModel(f"{self._where}: {module}.{part} is not one positive number")
                return float(1 / values[0]) if is_inverse else float(values[0])
        raise BrokenModel(f"{self._where}: {module} has no input_scale, but its inputs are said to be static")

    def is_zero_bias(self, name: str) -> bool:
        """GPTQ's first tools stored a bias of zeros beside every matrix."""
        return name.removesuffix(".bias") in self._modules and not self._load(name).data.any()

    def _made(self, module: str) -> StoredMatrix:
        parts = self._modules[module]
        format = self._scheme.format_of(module)
        if format is None:
            raise BrokenModel(
                f"{self._where}: {module} is quantized (it has {', '.join(sorted(parts))}), but the "
                "quantization settings say that it is not"
            )
        missing = not {"weight_packed", "qweight", "weight"} & parts.keys()
        if missing:
            raise BrokenModel(f"{self._where}: {module} has {', '.join(sorted(parts))}, but no weights")
        tensors = {part: self._load(name) for part, name in parts.items()}
        return StoredMatrix(format, tensors, f"{self._where}: {module}")
