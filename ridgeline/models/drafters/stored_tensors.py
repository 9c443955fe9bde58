"""Tensors of a draft head's safetensors files, as torch tensors of a checked shape."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.safetensors_file import SafetensorsFile

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


def read_tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Tensor:
    """Raises BrokenModel if it is missing, or of another type or shape."""
    stored = file.tensors.get(name)
    if stored is None or stored.dtype not in DTYPES or stored.shape != shape:
        found = "is missing" if stored is None else f"is {stored.dtype} {list(stored.shape)}"
        raise BrokenModel(f"{file.path}: tensor {name} {found}; expected shape {list(shape)}")
    raw = torch.from_numpy(np.array(file.raw(name)))
    return raw.view(DTYPES[stored.dtype]).view(shape)
