"""Factors of NVFP4 tensors in GGUF files: `x.scale` beside `x.weight`, one float, or one for each expert.

Without it the factor is 1. `x.input_scale` belongs to inputs and is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import GgufFile, GgufTensor

TYPE = "NVFP4"
Floats = np.ndarray[Any, np.dtype[np.float32]]
_WEIGHT, _FACTOR, _INPUTS = ".weight", ".scale", ".input_scale"


def factor_names(tensors: Mapping[str, GgufTensor]) -> set[str]:
    """The tensors that are factors of others."""
    stems = [
        name.removesuffix(_WEIGHT)
        for name, tensor in tensors.items()
        if tensor.type == TYPE and name.endswith(_WEIGHT)
    ]
    return {stem + end for stem in stems for end in (_FACTOR, _INPUTS)} & tensors.keys()


def read_factors(file: GgufFile) -> dict[str, Floats]:
    """By the name of the tensor that they multiply."""
    found: dict[str, Floats] = {}
    for name in factor_names(file.tensors):
        if not name.endswith(_FACTOR):
            continue
        weight = name.removesuffix(_FACTOR) + _WEIGHT
        shape = file.tensors[weight].shape
        factors = file.raw(name).view("<f4") if file.tensors[name].type == "F32" else np.zeros(0, np.float32)
        if factors.size not in (1, shape[0] if len(shape) == 3 else 1) or not np.isfinite(factors).all():
            raise BrokenModel(
                f"{file.path}: tensor {name} is not one finite float32, nor one for each matrix of {weight}"
            )
        found[weight] = factors
    return found


def factors_of_rows(factors: Floats, rows: np.ndarray[Any, Any], stored_rows: int) -> Floats:
    """[rows]: the factor of each of these rows. stored_rows: of the whole tensor."""
    chosen: Floats = factors[rows * len(factors) // stored_rows]
    return chosen
