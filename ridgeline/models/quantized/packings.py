"""Reads matrices out of the tensors that files have for them: one reader for each packing.

`StoredMatrix` has the tensors of one matrix by the part of their names after the module's (weight_packed,
scales, g_idx, …) and reads any of its rows as a QuantizedMatrix. Tensors are bytes with a safetensors type;
nothing here opens a file. `compressed` writes what compressed-tensors reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.errors import BrokenModel
from ridgeline.models.quantized.format import Granularity, QuantFormat
from ridgeline.models.quantized.matrix import Codes, QuantizedMatrix
from ridgeline.models.quantized.numbers import Floats, bfloat16, e4m3, e8m0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Rows = NDArray[np.intp]

# By packing: the tensors that a matrix must have, alternatives separated by |, and those that it may have.
# Scales of inputs and of the KV cache are left unread: inputs and the cache are not rounded to 8 bits.
TENSORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": (("weight", "weight_scale"), ("weight_zero_point", "weight_shape")),
    "block": (("weight", "weight_scale_inv|weight_scale"), ()),
    "pack32": (("weight_packed", "weight_scale"), ("weight_shape", "weight_zero_point", "weight_g_idx")),
    "pairs": (
        ("weight_packed|weight", "weight_scale"),
        ("weight_global_scale", "weight_scale_2", "weight_shape"),
    ),
    "gptq": (("qweight", "scales", "qzeros"), ("g_idx",)),
    "awq": (("qweight", "scales"), ("qzeros",)),
    "bnb4": (
        ("weight", "weight.absmax", "weight.quant_map"),
        (
            *("weight.nested_absmax", "weight.nested_quant_map"),
            *("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"),
        ),
    ),
    "bnb8": (("weight", "SCB"), ("weight_format",)),
}
KV_SCALES = ("k_scale", "v_scale", "q_scale")
UNREAD = ("input_scale", "input_global_scale", "input_zero_point", *KV_SCALES)
# AWQ: nibble i of a word belongs to column _AWQ_ORDER[i] of eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: its safetensors type, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def array(self) -> NDArray[Any]:
        """The elements as stored: a view, in the shape of the tensor; bfloat16 as 16-bit patterns."""
        return self.data.view(_ARRAYS[self.dtype]).reshape(self.shape)

    def floats(self, of: NDArray[Any] | None = None) -> Floats:
        """The values of elements of `array` (default: all); untyped bytes are powers of two."""
        decode = _FLOATS[self.dtype]
        return decode(self.array() if of is None else of)


_ARRAYS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<u4",
    "U32": "<u4",
    "I8": "i1",
    "U8": "u1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}
_FLOATS: dict[str, Callable[[Any], Floats]] = {
    "F64": lambda values: values.astype(np.float32),
    "F32": lambda values: values.astype(np.float32),
    "F16": lambda values: values.astype(np.float32),
    "BF16": bfloat16,
    "F8_E4M3": e4m3,
    "F8_E8M0": e8m0,
    "U8": e8m0,
}
SCALE_TYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "e4m3",
    "F8_E8M0": "e8m0",
    "U8": "e8m0",
}


class StoredMatrix:
    """One matrix [rows, columns] of a file. Nothing but small tensors is read before `read`."""

    def __init__(self, format: QuantFormat, tensors: Mapping[str, StoredTensor], where: str) -> None:
        """where: the file and the matrix, for errors. BrokenModel if a tensor is missing, or does not fit."""
        self.where = where
        self._tensors = tensors
        for names in TENSORS[format.packing][0]:
            if not any(name in tensors for name in names.split("|")):
                raise self._broken(f"has no {' or '.join(names.split('|'))}, but is said to be {format}")
        self._elements = self._first("weight_packed", "qweight", "weight")
        self._state = self._quant_state(format) if format.packing == "bnb4" else {}
        self.shape = self._shape(format)
        self.format = self._completed(format)
        self._check()
        self._groups = self._column_groups()

    @property
    def is_act_order(self) -> bool:
        """Whether columns are in another order than their groups."""
        return self._groups is not None

    def read(self, rows: Rows | None = None) -> QuantizedMatrix:
        """These rows, in this order (default: all), each with its scales."""
        chosen = np.arange(self.shape[0]) if rows is None else rows
        scales, zeros = self.parameters(chosen)
        wide = self.format.group_shape(self.shape)[1]
        return QuantizedMatrix(
            replace(self.format, group=(0 if self.format.granularity == "tensor" else 1, wide)),
            self._codes(chosen),
            scales,
            zeros,
            self._tensor_scale(),
            self._groups,
        )

    def parameters(self, rows: Rows) -> tuple[Floats, NDArray[np.int8] | None]:
        """(scales, zero points) of these rows; one line where all rows share them."""
        lines = self._lines(rows)
        scales = self._scales(lines)
        if not np.isfinite(scales).all():
            raise self._broken("has scales that are not finite")
        zeros = self._zeros(lines) if self.format.zero_point or self.format.packing == "gptq" else None
        if zeros is not None and not (self.format.zero_point or zeros.any()):
            zeros = None  # GPTQ stores the middle for symmetric weights
        return scales, zeros

    # ---- the parts, by packing ----

    def _lines(self, rows: Rows) -> Rows:
        if self.format.granularity == "tensor":
            return np.zeros(1, np.intp)
        return rows // self.format.group_shape(self.shape)[0]

    def _codes(self, rows: Rows) -> Codes:
        packing, bits = self.format.packing, self.format.bits
        stored, columns = self._elements, self.shape[1]
        if packing in ("plain", "block", "bnb8"):
            codes: Codes = stored.array()[rows]
            return codes
        if packing == "pack32":
            taken = stored.array()[rows].view(np.uint8)
            return _signed(_unpacked(taken, bits)[:, :columns], bits)
        if packing == "pairs":
            return _unpacked(stored.array()[rows].view(np.uint8), 4)
        if packing == "bnb4":
            packed = stored.data.reshape(self.shape[0], -1)[rows]
            return _unpacked(packed << np.uint8(4) | packed >> np.uint8(4), 4)
        if packing == "gptq":
            return _signed(_down_words(stored.array(), rows, bits), bits)
        return _signed(_awq_columns(stored.array(), rows).T, bits)

    def _scales(self, lines: Rows) -> Floats:
        """[lines, groups of columns]; a line is a row, or the rows of a block."""
        packing = self.format.packing
        if packing == "bnb4":
            return self._absmax(lines)
        stored = self._scale_tensor()
        if packing in ("gptq", "awq"):
            return np.ascontiguousarray(stored.floats(stored.array()[:, lines]).T)
        if packing == "bnb8":
            return stored.floats(stored.array()[lines]).reshape(-1, 1) / np.float32(127)
        return stored.floats(stored.array().reshape(self.format.scales_shape(self.shape))[lines])

    def _zeros(self, lines: Rows) -> NDArray[np.int8]:
        bits, packing = self.format.bits, self.format.packing
        if packing == "gptq":
            packed = self._tensors["qzeros"].array()
            zeros = _along(packed, lines, bits).T.astype(np.int16)
            first = (0 if self.format.stored_zeros == "whole" else 1) - (1 << (bits - 1))
            return (zeros + first).astype(np.int8)
        if packing == "awq":
            return _signed(_awq_columns(self._tensors["qzeros"].array(), lines).T, bits)
        stored = self._tensors["weight_zero_point"]
        if packing == "pack32" and stored.dtype == "I32":  # packed along the rows: [words, groups]
            return _signed(_along(stored.array().T, lines, bits).T, bits)
        zeros_of: NDArray[np.int8] = stored.array().reshape(self.format.scales_shape(self.shape))[lines]
        return zeros_of.view(np.int8)

    def _tensor_scale(self) -> float:
        if "weight_global_scale" in self._tensors:  # compressed-tensors stores what scales were multiplied by
            return float(np.float32(1) / self._tensors["weight_global_scale"].floats().reshape(-1)[0])
        if "weight_scale_2" in self._tensors:
            return float(self._tensors["weight_scale_2"].floats().reshape(-1)[0])
        return 1.0

    def _absmax(self, lines: Rows) -> Floats:
        """The largest magnitude of each block; a second quantization of them is undone."""
        stored = self._tensors["weight.absmax"]
        across = self.shape[1] // self.format.group[1]
        blocks = lines[:, None] * across + np.arange(across)
        if stored.dtype != "U8":
            return stored.floats(stored.array().reshape(-1)[blocks])
        table = self._tensors["weight.nested_quant_map"].floats()
        outer = self._tensors["weight.nested_absmax"].floats()
        inner: Floats = table[stored.data[blocks]] * outer[blocks // int(self._state["nested_blocksize"])]
        return inner + np.float32(self._state["nested_offset"])

    def _column_groups(self) -> NDArray[np.intp] | None:
        """The group of each column; None where columns are in the order of their groups."""
        stored = self._tensors.get("g_idx") or self._tensors.get("weight_g_idx")
        if stored is None:
            return None
        groups = stored.array().view(np.int32).astype(np.intp)
        if self.format.packing == "pack32" and (groups < 0).all():
            return None  # compressed-tensors' initial value: no order was chosen
        count = self.format.scales_shape(self.shape)[1]
        if groups.shape != (self.shape[1],) or groups.min() < 0 or groups.max() >= count:
            raise self._broken(f"has column groups outside 0 … {count - 1}")
        wide = self.format.group_shape(self.shape)[1]
        return None if np.array_equal(groups, np.arange(self.shape[1]) // wide) else groups

    # ---- what the tensors say of the format ----

    def _shape(self, format: QuantFormat) -> tuple[int, int]:
        elements, per_word = self._elements, 32 // format.bits
        if format.packing == "bnb4":
            shape = self._state.get("shape")
            if not isinstance(shape, list) or len(shape) != 2 or math.prod(shape) != 2 * elements.data.size:
                raise self._broken(f"has the shape {shape} and {elements.data.size} bytes of 4-bit weights")
            return shape[0], shape[1]
        if len(elements.shape) != 2:
            raise self._broken(f"is stored with {len(elements.shape)} dimensions, not as a matrix")
        first, second = elements.shape
        if format.packing == "gptq":
            return second, first * per_word
        if format.packing == "awq":
            return second * per_word, first
        if format.packing == "pack32":
            return self._declared_shape((first, second * per_word), per_word)
        return first, second * 2 if format.packing == "pairs" else second

    def _declared_shape(self, packed: tuple[int, int], per_word: int) -> tuple[int, int]:
        """Rows whose last word is not full have fewer columns than the words have room for."""
        if "weight_shape" not in self._tensors:
            return packed
        declared = self._tensors["weight_shape"].array().reshape(-1).tolist()
        if len(declared) != 2 or declared[0] != packed[0] or not 0 <= packed[1] - declared[1] < per_word:
            raise self._broken(f"has the shape {declared}, but its words hold {list(packed)}")
        return declared[0], declared[1]

    def _completed(self, format: QuantFormat) -> QuantFormat:
        """The format with what only the tensors say: the scales' type, the element, per row or per tensor."""
        if format.packing == "bnb4":
            if self._state.get("quant_type") != format.element:
                raise self._broken(
                    f"is {self._state.get('quant_type')}, but config.json says {format.element}"
                )
            return replace(format, group=(1, int(self._state["blocksize"])))
        if format.packing == "bnb8":
            return format
        scale = self._scale_tensor()
        if scale.dtype not in SCALE_TYPES:
            raise self._broken(f"has scales of type {scale.dtype}")
        changed = replace(format, scale=SCALE_TYPES[scale.dtype])
        if self._elements.dtype == "F8_E5M2":
            changed = replace(changed, element="e5m2")
        if format.granularity in ("tensor", "channel"):  # some producers write rows of scales for "tensor"
            per_row = math.prod(scale.shape) == self.shape[0] > 1 or format.packing in ("gptq", "awq")
            kind: Granularity = "channel" if per_row else "tensor"
            changed = replace(changed, granularity=kind, group=(1, 0) if per_row else (0, 0))
        return changed

    def _quant_state(self, format: QuantFormat) -> dict[str, Any]:
        name = f"weight.quant_state.bitsandbytes__{format.element}"
        try:
            state = json.loads(bytes(self._tensors[name].data))
        except (KeyError, ValueError) as error:
            raise self._broken(f"has no valid {name}") from error
        needed = {"blocksize"} | ({"nested_blocksize", "nested_offset"} if self._is_nested() else set())
        if not isinstance(state, dict) or needed - state.keys():
            raise self._broken(f"has no {', '.join(sorted(needed))} in {name}")
        return state

    def _is_nested(self) -> bool:
        return self._tensors["weight.absmax"].dtype == "U8"

    def _check(self) -> None:
        format, (rows, columns) = self.format, self.shape
        wide = format.group_shape(self.shape)[1]
        if format.granularity == "group" and columns % wide and not format.act_order:
            raise self._broken(f"has rows of {columns} weights, which are not whole groups of {wide}")
        if format.tensor_scale and not {"weight_global_scale", "weight_scale_2"} & self._tensors.keys():
            raise self._broken("has neither weight_global_scale nor weight_scale_2")
        if format.zero_point and not {"qzeros", "weight_zero_point"} & self._tensors.keys():
            raise self._broken(f"has no zero points, but is said to be {format}")
        found, wanted = math.prod(self._scale_tensor().shape), math.prod(format.scales_shape(self.shape))
        if found != wanted:
            raise self._broken(f"has {found} scales, but {format} of {rows}×{columns} needs {wanted}")
        if "weight_format" in self._tensors and self._tensors["weight_format"].array().any():
            raise self._broken("is stored in tiles (its weight_format is not 0): save it in row-major order")
        dtype, needed = self._elements.dtype, _ELEMENT_TYPES.get((format.packing, format.is_integer), ())
        if dtype not in needed:
            raise self._broken(f"is stored as {dtype}, but {format} is stored as {' or '.join(needed)}")

    def _scale_tensor(self) -> StoredTensor:
        return self._first("weight_scale", "weight_scale_inv", "scales", "SCB", "weight.absmax")

    def _first(self, *names: str) -> StoredTensor:
        return next(self._tensors[name] for name in names if name in self._tensors)

    def _broken(self, reason: str) -> BrokenModel:
        return BrokenModel(f"{self.where} {reason}")


_FP8 = ("F8_E4M3", "F8_E5M2")
_ELEMENT_TYPES: dict[tuple[str, bool], tuple[str, ...]] = {
    ("plain", True): ("I8",),
    ("plain", False): _FP8,
    ("block", True): ("I8",),
    ("block", False): _FP8,
    ("pack32", True): ("I32",),
    ("pairs", False): ("U8", "I8"),
    ("gptq", True): ("I32",),
    ("awq", True): ("I32",),
    ("bnb4", False): ("U8",),
    ("bnb8", True): ("I8",),
}


def _unpacked(packed: Bytes, bits: int) -> Bytes:
    """[rows, bytes] → [rows, elements]: the lowest bits first."""
    if bits == 8:
        return packed
    per_byte = 8 // bits
    out = np.empty((len(packed), packed.shape[1] * per_byte), np.uint8)
    for place in range(per_byte):  # several times as fast as one shift over a last axis of two
        out[:, place::per_byte] = packed >> np.uint8(place * bits) & np.uint8((1 << bits) - 1)
    return out


def _signed(codes: Bytes, bits: int) -> NDArray[np.int8]:
    """0 … 2^bits - 1 as numbers around 0."""
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)


def _down_words(words: NDArray[np.uint32], columns: Rows, bits: int) -> Bytes:
    """[words, columns], packed down the columns → [columns, elements]."""
    taken = np.ascontiguousarray(words[:, columns].T)
    return _unpacked(taken.view(np.uint8), bits)


def _along(words: NDArray[np.uint32], columns: Rows, bits: int) -> Bytes:
    """[lines, words], packed along the lines → [lines, columns]."""
    per_word = 32 // bits
    taken = words[:, columns // per_word] >> (columns % per_word * bits).astype(np.uint32)
    return (taken & np.uint32((1 << bits) - 1)).astype(np.uint8)


def _awq_columns(words: NDArray[np.uint32], columns: Rows) -> Bytes:
    """As `_along` for 4 bits, in AWQ's order."""
    shifts = np.argsort(_AWQ_ORDER).astype(np.uint32) * np.uint32(4)
    taken = words[:, columns // 8] >> shifts[columns % 8]
    return (taken & np.uint32(15)).astype(np.uint8)
