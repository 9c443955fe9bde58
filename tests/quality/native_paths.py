"""The ways the native library takes to a logit, and how far each ends from float32 on the same weights.

A path is an instruction set, a KV format and a regime: how many rows a step computes, on which the library's
arithmetic depends. Used by the tests of this folder; knows no bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ridgeline.ops.cpu.interface import NativeUnavailable
from ridgeline.ops.cpu.library import (
    BLOCK_TOKENS,
    DecoderTable,
    Format,
    KvFormat,
    LayerTable,
    NativeDecoder,
    PackedMatrix,
    available_isas,
    pack_float,
    unpack,
)

try:
    ISAS = available_isas()
except NativeUnavailable:
    ISAS = ()

KV_FORMATS = (KvFormat.BF16, KvFormat.INT8)  # near float32: held to the bounds of the weights
ROUNDED_KV_FORMATS = (*KV_FORMATS, KvFormat.INT4)
CONTEXT_CHUNK = 64

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Regime:
    """How sequences are computed: by turns of `batches` together, each `chunk` tokens further per step."""

    name: str
    batches: tuple[int, ...]
    chunk: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Sequences that begin with one context in common and go on differently."""

    context: Ints  # whole blocks
    endings: Ints  # [sequences, length]

    @property
    def blocks(self) -> int:
        """KV blocks that hold it: the context once, each ending in its own blocks."""
        sequences, length = self.endings.shape
        return _blocks(len(self.context)) + sequences * _blocks(length)


# ---- steps ----


class Course:
    """A text's sequences in the KV cache of one decoder, computed further step by step."""

    def __init__(
        self, decoder: NativeDecoder, text: Text, *, first_block: int = 0, chunk: int = CONTEXT_CHUNK
    ) -> None:
        """Reads the context, in chunks, into the blocks from `first_block` on."""
        self.vocab = decoder.vocab
        self._decoder = decoder
        self._text = text
        self._start = len(text.context)
        sequences, length = text.endings.shape
        shared = _blocks(self._start)
        blocks = np.arange(first_block, first_block + text.blocks, dtype=np.int32)
        own = blocks[shared:].reshape(sequences, _blocks(length))
        self._block_tables = np.concatenate([np.tile(blocks[:shared], (sequences, 1)), own], 1)
        self.rewind()
        for start in range(0, self._start, chunk):
            ids = text.context[start : start + chunk]
            positions = np.arange(start, start + len(ids), dtype=np.int32)
            self._execute(ids[None, :], positions[None, :], self._block_tables[:1], logits=False)

    def rewind(self) -> None:
        """Back to the end of the context."""
        self._done = np.zeros(len(self._text.endings), np.int32)

    def advance(self, which: Ints, count: int) -> Floats:
        """One step: `count` tokens of each sequence in `which`; their logits [sequences, count, vocab]."""
        offsets = self._done[which][:, None] + np.arange(count, dtype=np.int32)
        ids = np.take_along_axis(self._text.endings[which], offsets, 1)
        logits = self._execute(ids, offsets + self._start, self._block_tables[which], logits=True)
        self._done[which] += count
        return logits.reshape(len(which), count, -1)

    def _execute(self, ids: Ints, positions: Ints, tables: Ints, *, logits: bool) -> Floats:
        rows, count = ids.shape
        return self._decoder.execute(
            np.ascontiguousarray(ids).ravel(),
            np.ascontiguousarray(positions, np.int32).ravel(),
            np.arange(rows + 1, dtype=np.int32) * count,
            np.ascontiguousarray(tables),
            np.arange(rows * count if logits else 0, dtype=np.int32),
        )


def steps(course: Course, size: tuple[int, int], regime: Regime) -> Iterator[tuple[Ints, slice, Floats]]:
    """A regime's steps over the first `size` (sequences, positions) of the endings: which, where, logits."""
    sequences, length = size
    first = turn = 0
    course.rewind()
    while first < sequences:
        together = min(regime.batches[turn % len(regime.batches)], sequences - first)
        which = np.arange(first, first + together, dtype=np.int32)
        for start in range(0, length, regime.chunk):
            end = min(start + regime.chunk, length)
            yield which, slice(start, end), course.advance(which, end - start)
        first, turn = first + together, turn + 1


def logits_of(course: Course, size: tuple[int, int], regime: Regime) -> Floats:
    """[sequences, positions, vocab]"""
    found = np.empty((*size, course.vocab), np.float32)
    for which, positions, logits in steps(course, size, regime):
        found[which, positions] = logits
    return found


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


# ---- divergence ----


def reference(table: DecoderTable, text: Text) -> Floats:
    """Log-probabilities [sequences, length, vocab] by the best instruction set, with float32 KV and float32
    weights that equal the packed ones."""
    decoder = decoder_for(in_float32(table), text, KvFormat.F32, ISAS[0])
    found = logits_of(Course(decoder, text), text.endings.shape, Regime("reference", (1,), CONTEXT_CHUNK))
    for sequence in found:
        sequence[:] = logprobs(sequence)
    return found


def divergences(course: Course, size: tuple[int, int], regime: Regime, expected: Floats) -> Doubles:
    """KL(expected ‖ path) of every next-token distribution, [sequences, positions]."""
    found = np.empty(size)
    for which, positions, logits in steps(course, size, regime):
        found[which, positions] = kl(expected[which, positions], logprobs(logits))
    return found


def kl(expected: Floats, actual: Floats) -> Doubles:
    """Of log-probabilities along the last axis."""
    divergence: Doubles = (np.exp(expected) * (expected - actual)).sum(-1, dtype=np.float64)
    return divergence


def logprobs(logits: Floats) -> Floats:
    shifted: Floats = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


# ---- decoders ----


def decoder_for(
    table: DecoderTable,
    text: Text,
    kv_format: KvFormat,
    isa: str,
    *,
    deterministic: bool = False,
    threads: int = 1,
    copies: int = 1,
) -> NativeDecoder:
    """A decoder with room for the text, or for several copies of it.

    One thread: their number changes no result (test_regimes), and on a busy machine several would wait for
    each other."""
    sequences, length = text.endings.shape
    sized = replace(
        table,
        num_blocks=copies * text.blocks,
        max_step_tokens=max(CONTEXT_CHUNK, sequences * length),
        kv_format=kv_format,
        deterministic=deterministic,
    )
    return NativeDecoder(sized, threads, isa)


def in_float32(table: DecoderTable) -> DecoderTable:
    return with_matrices(table, lambda matrix: Format.F32)


def with_matrices(table: DecoderTable, format_of: Callable[[PackedMatrix], Format]) -> DecoderTable:
    """The same decoder, every matrix packed again from its floats."""

    def packed(matrix: PackedMatrix) -> PackedMatrix:
        return pack_float(format_of(matrix), unpack(matrix), bias=matrix.bias)

    def layer(old: LayerTable) -> LayerTable:
        return replace(
            old,
            qkv=packed(old.qkv),
            output=packed(old.output),
            gate_up=None if old.gate_up is None else packed(old.gate_up),
            down=None if old.down is None else packed(old.down),
        )

    embedding = packed(table.embedding)
    return replace(
        table,
        embedding=embedding,
        lm_head=embedding if table.lm_head is table.embedding else packed(table.lm_head),
        layers=[layer(old) for old in table.layers],
    )
