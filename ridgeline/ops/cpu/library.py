"""The native library for Python, with ctypes and numpy only: packing, decoders, instruction sets, ceilings.

Loaders pack weights with it (`matrices`), the native runner executes steps of a decoder (`tables`), limits
and calibration measure. Python checks the type and length of every array, which the library cannot know; the
library checks everything else, and its errors become NativeError. Never imports torch.
"""

from __future__ import annotations

import os
from ctypes import byref

import numpy as np

from ridgeline.ops.cpu.interface import (
    ABI_VERSION,
    ALIGNMENT,
    LIBRARY_PATH,
    Activation,
    CLayer,
    CStep,
    FfnKind,
    Format,
    KvFormat,
    NativeError,
    NativeUnavailable,
    NormKind,
    Peak,
    QkNorm,
    Scores,
    address,
    call,
    last_error,
    load,
)
from ridgeline.ops.cpu.matrices import (
    BLOCK_TOKENS,
    F8_GROUP,
    GGUF_TYPES,
    GROUP_SIZE,
    PANEL_ROWS,
    Bytes,
    Floats,
    GgufBlocks,
    Ints,
    PackedMatrix,
    aligned_bytes,
    pack_codes,
    pack_float,
    pack_gguf,
    packed_bytes,
    unpack,
)
from ridgeline.ops.cpu.tables import (
    DecoderTable,
    ExpertsTable,
    LayerTable,
    NormTable,
    c_decoder,
    c_layer,
)

__all__ = [
    "ABI_VERSION", "ALIGNMENT", "BLOCK_TOKENS", "F8_GROUP", "GGUF_TYPES", "GROUP_SIZE", "ISA_VARIABLE",
    "LIBRARY_PATH", "PANEL_ROWS", "Activation", "Bytes", "DecoderTable", "ExpertsTable", "FfnKind",
    "Floats", "Format", "GgufBlocks", "Ints", "KvFormat", "LayerTable", "NativeDecoder", "NativeError",
    "NativeUnavailable", "NormKind", "NormTable", "PackedMatrix", "Peak", "QkNorm", "Scores",
    "aligned_bytes", "available_isas", "choose_isa", "load", "measure_peak", "measure_read",
    "measure_read_of", "pack_codes", "pack_float", "pack_gguf", "packed_bytes", "unpack",
]  # fmt: skip

ISA_VARIABLE = "RIDGELINE_ISA"


class NativeDecoder:
    """A model with its KV cache and threads. Used by one thread at a time; `close` releases the memory."""

    def __init__(self, table: DecoderTable, threads: int, isa: str | None = None) -> None:
        """isa: None uses RIDGELINE_ISA, or else the best available one."""
        self._handle: int | None = None
        self._library = load()
        self.table = table  # keeps the weights alive, which the library reads in place
        self.vocab = table.vocab
        layers = (CLayer * len(table.layers))(*(c_layer(layer, table) for layer in table.layers))
        self._handle = self._library.rl_model_create(
            byref(c_decoder(table, layers)), choose_isa(isa).encode(), threads
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
        *,
        deterministic: bool = False,
    ) -> Floats:
        """One forward pass: the logits [L, vocab] of the tokens in `logit_rows`, in `out` if given.

        token_ids    [T]      rows (sequences) concatenated, prefill chunks and decodes mixed
        positions    [T]      consecutive inside a row
        query_starts [R + 1]  row r owns tokens query_starts[r] … query_starts[r + 1] - 1
        block_tables [R, B]   KV blocks of each row; blocks beyond its context are not read
        logit_rows   [L]      indices into T, ascending
        deterministic: with the arithmetic of a deterministic model, which is that of a step of one token
        """
        count = len(logit_rows)
        if out is None:
            out = np.empty((count, self.vocab), np.float32)
        elif len(out) < count:
            raise NativeError(f"{count} rows of logits do not fit in the {len(out)} given")
        logits = address(out, np.float32, (len(out), self.vocab), "the logits")
        step = _step(token_ids, positions, query_starts, block_tables, logit_rows, deterministic)
        self._execute(step, logits=logits, best=None)
        return out[:count]

    def best_tokens(
        self,
        token_ids: Ints,
        positions: Ints,
        query_starts: Ints,
        block_tables: Ints,
        logit_rows: Ints,
        *,
        deterministic: bool = False,
    ) -> list[int]:
        """The forward pass of `execute` without logits: the best token for each of `logit_rows`.

        That is the index of the largest logit, the first of equal ones; -1 if the largest is not finite or a
        logit is NaN.
        """
        best = np.empty(len(logit_rows), np.int32)
        step = _step(token_ids, positions, query_starts, block_tables, logit_rows, deterministic)
        self._execute(step, logits=None, best=best.ctypes.data)
        tokens: list[int] = best.tolist()
        return tokens

    def _execute(self, step: CStep, logits: int | None, best: int | None) -> None:
        if self._library.rl_step_execute(self._open(), byref(step), logits, best):
            raise NativeError(f"the native library rejected a step: {last_error()}")

    def copy_block(self, source: int, target: int) -> None:
        """Copies one KV block of every layer."""
        call("rl_copy_block", self._open(), source, target)

    def expert_counts(self) -> dict[int, list[int]]:
        """For each layer with experts, the tokens that chose each of them."""
        counts: dict[int, list[int]] = {}
        for number, layer in enumerate(self.table.layers):
            if layer.experts is None:
                continue
            tokens = np.empty(layer.experts.num, np.int64)
            call("rl_expert_counts", self._open(), number, tokens.ctypes.data, len(tokens))
            counts[number] = tokens.tolist()
        return counts

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


def _measured(value: float) -> float:
    if value < 0:
        raise NativeError(f"could not measure the machine: {last_error()}")
    return value


def _step(
    token_ids: Ints,
    positions: Ints,
    query_starts: Ints,
    block_tables: Ints,
    logit_rows: Ints,
    deterministic: bool,
) -> CStep:
    """Holds no reference to the arrays: they must outlive it."""
    tokens, rows, count = len(token_ids), len(query_starts) - 1, len(logit_rows)
    width = block_tables.shape[1]
    return CStep(
        tokens,
        rows,
        count,
        width,
        deterministic,
        address(token_ids, np.int32, (tokens,), "token_ids"),
        address(positions, np.int32, (tokens,), "positions"),
        address(query_starts, np.int32, (rows + 1,), "query_starts"),
        address(block_tables, np.int32, (rows, width), "block_tables"),
        address(logit_rows, np.int32, (count,), "logit_rows"),
    )
