"""Writes a safetensors file: the other direction of `safetensors_file`.

The file appears under its name only when it is complete. The same tensors give the same bytes: the header is
in the order of the names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ridgeline.models.files.reserve import reserve

_ALIGNMENT = 8  # of the header's end, which the format asks for


class Stored(Protocol):
    """A tensor's type, shape and bytes, as `quantized.packings.StoredTensor` has them."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> Any: ...


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(tensors)
    end = 0
    for name in ordered:
        tensor = tensors[name]
        begin, end = end, end + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        reserve(file.fileno(), 8 + len(text) + end, unfinished)
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in ordered:
            file.write(memoryview(tensors[name].data).cast("B"))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
