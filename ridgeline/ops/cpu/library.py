"""The native library for Python, with ctypes and numpy only: packing, decoders, instruction sets, ceilings.

Loaders pack weights with it, the native runner executes steps, limits and calibration measure. It checks the
type and length of every array, which the library cannot know; the library checks everything else, and its
errors become NativeError. It never imports torch and decides only the instruction set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import Array, byref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.ops.cpu.interface import (
    ABI_VERSION,
    ALIGNMENT,
    DECODER_FLOATS,
    DECODER_INTS,
    LIBRARY_PATH,
    MATRICES,
    NORMS,
    Activation,
    CDecoder,
    CLayer,
    CMatrix,
    CStep,
    Format,
    KvFormat,
    NativeError,
    NativeUnavailable,
    Peak,
    address,
    call,
    check_buffer,
    last_error,
    load,
)

__all__ = [
    "ABI_VERSION", "ALIGNMENT", "BLOCK_TOKENS", "GGUF_TYPES", "GROUP_SIZE", "ISA_VARIABLE", "LIBRARY_PATH",
    "PANEL_ROWS", "Activation", "DecoderTable", "Format", "GgufBlocks", "KvFormat", "LayerTable",
    "NativeDecoder", "NativeError", "NativeUnavailable", "PackedMatrix", "Peak", "aligned_bytes",
    "available_isas", "choose_isa", "load", "measure_peak", "measure_read", "measure_read_of",
    "pack_float", "pack_gguf", "packed_bytes", "unpack",
]  # fmt: skip

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

BLOCK_TOKENS = 16  # RL_BLOCK_TOKENS: tokens of a KV block
PANEL_ROWS = 16  # RL_PANEL: adjacent output rows in a packed matrix
GROUP_SIZE = 32  # RL_GROUP: weights of a row that share a scale
ISA_VARIABLE = "RIDGELINE_ISA"


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A GGUF type that the library packs without loss: its blocks, and their packed format."""

    block_weights: int
    block_bytes: int
    format: Format

    def row_bytes(self, k: int) -> int:
        return k // self.block_weights * self.block_bytes


GGUF_TYPES = {  # by GGUF's type number
    2: GgufBlocks(32, 18, Format.Q4_H),  # Q4_0
    3: GgufBlocks(32, 20, Format.Q4_HM),  # Q4_1
    6: GgufBlocks(32, 22, Format.Q8_FM),  # Q5_0
    7: GgufBlocks(32, 24, Format.Q8_FM),  # Q5_1
    8: GgufBlocks(32, 34, Format.Q8_H),  # Q8_0
    12: GgufBlocks(256, 144, Format.Q4_FM),  # Q4_K
    13: GgufBlocks(256, 176, Format.Q8_FM),  # Q5_K
}


# ---- packed matrices ----


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A packed matrix [n, k]. It keeps its buffer alive."""

    n: int
    k: int
    format: Format
    data: Bytes
    bias: Floats | None = None

    def __post_init__(self) -> None:
        check_buffer(self.data, packed_bytes(self.format, self.n, self.k), f"packed {self._name()}")
        if self.bias is not None:
            address(self.bias, np.float32, (self.n,), f"the bias of packed {self._name()}")

    def _name(self) -> str:
        return f"{self.format.name} matrix [{self.n}, {self.k}]"

    def _as_c(self) -> CMatrix:
        bias = None if self.bias is None else self.bias.ctypes.data
        return CMatrix(self.n, self.k, self.format, self.data.ctypes.data, bias)


def packed_bytes(format: Format, n: int, k: int) -> int:
    """Bytes of a packed matrix of this format and shape."""
    size = int(load().rl_packed_bytes(format, n, k))
    if size < 0:
        raise NativeError(f"a {Format(format).name} matrix of shape [{n}, {k}] cannot be packed")
    return size


def aligned_bytes(size: int) -> Bytes:
    """An uninitialised buffer with the kernels' alignment."""
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % ALIGNMENT
    return buffer[offset : offset + size]


def pack_float(
    format: Format, source: Floats, *, bias: Floats | None = None, out: Bytes | None = None
) -> PackedMatrix:
    """Pack floats [n, k], rounding or quantizing as the format needs, into `out` if given."""
    n, k = source.shape
    data = _target(out, format, n, k)
    floats = address(source, np.float32, (n, k), "the matrix to pack")
    call("rl_pack_float", format, n, k, floats, data.ctypes.data)
    return PackedMatrix(n, k, Format(format), data, bias)


def pack_gguf(
    gguf_type: int,
    source: Bytes,
    k: int,
    *,
    row_map: Ints | None = None,
    bias: Floats | None = None,
    out: Bytes | None = None,
) -> PackedMatrix:
    """Pack GGUF blocks without loss into the format in GGUF_TYPES.

    source:  the blocks of all rows of the tensor, in any shape
    k:       weights per row
    row_map: row r of the result is row row_map[r] of the source, zeros where that is -1; None keeps all rows
    """
    blocks = GGUF_TYPES.get(gguf_type)
    if blocks is None:
        raise NativeError(f"GGUF type {gguf_type} has no lossless packed format")
    row_bytes = blocks.row_bytes(k)
    if k <= 0 or k % blocks.block_weights or source.nbytes % row_bytes:
        raise NativeError(
            f"{source.nbytes} bytes are not whole rows of {k} weights of GGUF type {gguf_type} "
            f"({blocks.block_bytes} bytes per {blocks.block_weights} weights)"
        )
    source_rows = source.nbytes // row_bytes
    n = source_rows if row_map is None else len(row_map)
    data = _target(out, blocks.format, n, k)
    rows = None if row_map is None else address(row_map, np.int32, (n,), "row_map")
    packed = address(source, np.uint8, source.shape, "the blocks to pack")
    call("rl_pack_gguf", gguf_type, blocks.format, n, k, packed, source_rows, rows, data.ctypes.data)
    return PackedMatrix(n, k, blocks.format, data, bias)


def unpack(matrix: PackedMatrix, first: int = 0, count: int | None = None) -> Floats:
    """The floats of rows [first, first + count): what every kernel computes with."""
    count = matrix.n - first if count is None else count
    if first < 0 or count < 0 or first + count > matrix.n:
        raise NativeError(f"rows {first} to {first + count} are not all in a matrix of {matrix.n} rows")
    out = np.empty((count, matrix.k), np.float32)
    call("rl_unpack", byref(matrix._as_c()), first, count, out.ctypes.data)
    return out


# ---- models ----


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """One layer (rl_layer): norms are float32, ready to multiply with; None if the family has none."""

    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    attn_norm: Floats | None
    ffn_norm: Floats | None
    cosine: Floats  # [max_context, rotary_dim / 2]
    sine: Floats
    rotary_dim: int
    window: int = 0  # 0: full attention
    q_norm: Floats | None = None
    k_norm: Floats | None = None
    post_attn_norm: Floats | None = None
    post_ffn_norm: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderTable:
    """A whole decoder (rl_decoder): its shape, its weights, and the KV cache to allocate."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_context: int
    activation: Activation
    norm_eps: float
    attention_scale: float
    embedding: PackedMatrix
    lm_head: PackedMatrix  # the same object as `embedding` if tied
    final_norm: Floats
    layers: Sequence[LayerTable]
    num_blocks: int
    max_step_tokens: int
    kv_format: KvFormat = KvFormat.BF16
    deterministic: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0


class NativeDecoder:
    """A model with its KV cache and threads. Used by one thread at a time; `close` releases the memory."""

    def __init__(self, table: DecoderTable, threads: int, isa: str | None = None) -> None:
        """isa: None uses RIDGELINE_ISA, or else the best available one."""
        self._handle: int | None = None
        self._library = load()
        self.table = table  # keeps the weights alive, which the library reads in place
        self.vocab = table.vocab
        layers = (CLayer * len(table.layers))(*(_layer(layer, table) for layer in table.layers))
        self._handle = self._library.rl_model_create(
            byref(_decoder(table, layers)), choose_isa(isa).encode(), threads
        )
        if not self._handle:
            raise NativeError(f"the native library could not create this model: {last_error()}")
        self.isa: str = self._library.rl_model_isa(self._handle).decode()
        self.bytes = int(self._library.rl_model_bytes(self._handle))  # KV cache and step buffers

    def execute(
        self,
        token_ids: Ints,
        positions: Ints,
        query_starts: Ints,
        block_tables: Ints,
        logit_rows: Ints,
        out: Floats | None = None,
    ) -> Floats:
        """One forward pass: the logits [L, vocab] of the tokens in `logit_rows`, in `out` if given.

        token_ids    [T]      rows (sequences) concatenated, prefill chunks and decodes mixed
        positions    [T]      consecutive inside a row
        query_starts [R + 1]  row r owns tokens query_starts[r] … query_starts[r + 1] - 1
        block_tables [R, B]   KV blocks of each row; blocks beyond its context are not read
        logit_rows   [L]      indices into T, ascending
        """
        count = len(logit_rows)
        if out is None:
            out = np.empty((count, self.vocab), np.float32)
        elif len(out) < count:
            raise NativeError(f"{count} rows of logits do not fit in the {len(out)} given")
        logits = address(out, np.float32, (len(out), self.vocab), "the logits")
        step = _step(token_ids, positions, query_starts, block_tables, logit_rows)
        self._execute(step, logits=logits, best=None)
        return out[:count]

    def best_tokens(
        self, token_ids: Ints, positions: Ints, query_starts: Ints, block_tables: Ints, logit_rows: Ints
    ) -> list[int]:
        """The forward pass of `execute` without logits: the best token for each of `logit_rows`.

        That is the index of the largest logit, the first of equal ones; -1 if the largest is not finite or a
        logit is NaN.
        """
        best = np.empty(len(logit_rows), np.int32)
        step = _step(token_ids, positions, query_starts, block_tables, logit_rows)
        self._execute(step, logits=None, best=best.ctypes.data)
        tokens: list[int] = best.tolist()
        return tokens

    def _execute(self, step: CStep, logits: int | None, best: int | None) -> None:
        if self._library.rl_step_execute(self._open(), byref(step), logits, best):
            raise NativeError(f"the native library rejected a step: {last_error()}")

    def copy_block(self, source: int, target: int) -> None:
        """Copies one KV block of every layer."""
        call("rl_copy_block", self._open(), source, target)

    def close(self) -> None:
        if self._handle:
            self._library.rl_model_free(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> int:
        if not self._handle:
            raise NativeError("this decoder is closed")
        return self._handle


# ---- the machine ----


def available_isas() -> tuple[str, ...]:
    """The instruction sets of this CPU (the library has probed them), best first."""
    return tuple(load().rl_available_isas().decode().split(","))


def choose_isa(name: str | None = None) -> str:
    """The instruction set to use: `name`, else RIDGELINE_ISA, else the best available one."""
    available = available_isas()
    wanted = name or os.environ.get(ISA_VARIABLE) or available[0]
    if wanted not in available:
        origin = "" if name else f"{ISA_VARIABLE}="
        raise NativeError(f"{origin}{wanted} does not run on this machine; available: {', '.join(available)}")
    return wanted


def measure_read(size: int, threads: int) -> float:
    """Bytes per second of reading a buffer of `size` bytes."""
    return _measured(load().rl_measure_read(None, size, threads))


def measure_read_of(data: Bytes, threads: int) -> float:
    """Bytes per second of reading this memory; allocates none."""
    return _measured(load().rl_measure_read(data.ctypes.data, data.nbytes, threads))


def measure_peak(kind: Peak, threads: int, isa: str | None = None) -> float:
    """Operations per second from registers only; 0 if the instruction set has no such unit."""
    return _measured(load().rl_measure_peak(choose_isa(isa).encode(), kind, threads))


def _target(out: Bytes | None, format: Format, n: int, k: int) -> Bytes:
    size = packed_bytes(format, n, k)
    if out is None:
        return aligned_bytes(size)
    check_buffer(out, size, f"the buffer for a {Format(format).name} matrix [{n}, {k}]")
    if not out.flags.writeable:
        raise NativeError(f"the buffer for a {Format(format).name} matrix [{n}, {k}] is read-only")
    return out


def _measured(value: float) -> float:
    if value < 0:
        raise NativeError(f"could not measure the machine: {last_error()}")
    return value


def _step(
    token_ids: Ints, positions: Ints, query_starts: Ints, block_tables: Ints, logit_rows: Ints
) -> CStep:
    """Holds no reference to the arrays: they must outlive it."""
    tokens, rows, count = len(token_ids), len(query_starts) - 1, len(logit_rows)
    width = block_tables.shape[1]
    return CStep(
        tokens,
        rows,
        count,
        width,
        address(token_ids, np.int32, (tokens,), "token_ids"),
        address(positions, np.int32, (tokens,), "positions"),
        address(query_starts, np.int32, (rows + 1,), "query_starts"),
        address(block_tables, np.int32, (rows, width), "block_tables"),
        address(logit_rows, np.int32, (count,), "logit_rows"),
    )


def _layer(layer: LayerTable, table: DecoderTable) -> CLayer:
    tables = (table.max_context, layer.rotary_dim // 2)
    lengths = {"q_norm": table.head_dim, "k_norm": table.head_dim}
    fields: dict[str, Any] = {name: getattr(layer, name)._as_c() for name in MATRICES}
    for name in NORMS:
        norm = getattr(layer, name)
        if norm is not None:
            fields[name] = address(norm, np.float32, (lengths.get(name, table.hidden),), name)
    return CLayer(
        **fields,
        cosine=address(layer.cosine, np.float32, tables, "cosine"),
        sine=address(layer.sine, np.float32, tables, "sine"),
        rotary_dim=layer.rotary_dim,
        window=layer.window,
    )


def _decoder(table: DecoderTable, layers: Array[CLayer]) -> CDecoder:
    scalars = {
        name: getattr(table, name) for name in (*DECODER_INTS, *DECODER_FLOATS) if name != "num_layers"
    }
    return CDecoder(
        **scalars,
        num_layers=len(layers),
        embedding=table.embedding._as_c(),
        lm_head=table.lm_head._as_c(),
        final_norm=address(table.final_norm, np.float32, (table.hidden,), "final_norm"),
        layers=layers,
    )
