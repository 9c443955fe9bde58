"""Float tensors in a checkpoint's own types: rounded to them, and as bytes."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ridgeline.lab.errors import LabError
from ridgeline.models.quantized.packings import StoredTensor

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def as_stored(values: Tensor, dtype: str) -> Tensor:
    """The float32 values that a reader of the stored tensor sees."""
    return values.to(_TYPES[dtype]).float().clone()


def to_stored(
    values: Tensor, like: StoredTensor, *, transposed: bool = False, where: str = ""
) -> StoredTensor:
    """The tensor's bytes in the type and shape of `like`: norms of heads have a row for each head there.

    transposed: the file has the matrix [out, in] as [in, out].
    """
    typed = (values.T if transposed and values.ndim == 2 else values).to(_TYPES[like.dtype]).contiguous()
    if not bool(torch.isfinite(typed).all()):
        raise LabError(
            f"{where}: has values that {like.dtype} does not hold after scaling; try a smaller --alpha"
        )
    data = typed.view(torch.uint8).numpy().reshape(-1)
    assert typed.numel() == math.prod(like.shape)
    return StoredTensor(like.dtype, tuple(like.shape), np.ascontiguousarray(data))
