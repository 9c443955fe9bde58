"""Encoders of the native library, for Python: a table of float32 weights; texts in, vectors out.

Used by the encoder's runner; `models.encoders.packed` makes the table. As in `library`, the type and length
of every array are checked here and everything else by the library. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np

from ridgeline.ops.cpu.interface import (
    ENCODER_MATRICES,
    ENCODER_NORMS,
    Activation,
    CEncoder,
    CEncoderLayer,
    CTexts,
    NativeError,
    Pooling,
    address,
    last_error,
    load,
)
from ridgeline.ops.cpu.library import Floats, Ints, PackedMatrix, choose_isa


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayerTable:
    """One layer (rl_encoder_layer); every matrix is float32 and has a bias."""

    qkv: PackedMatrix
    output: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    attn_norm: Floats
    attn_norm_bias: Floats
    ffn_norm: Floats
    ffn_norm_bias: Floats


@dataclass(frozen=True, slots=True, eq=False)
class EncoderTable:
    """A whole encoder (rl_encoder), and the most tokens of one call."""

    heads: int
    activation: Activation
    norm_eps: float
    words: Floats  # [vocab, hidden]
    positions: Floats  # [max_positions, hidden]
    type_rows: Floats | None  # [types, hidden]
    norm: Floats
    norm_bias: Floats
    layers: Sequence[EncoderLayerTable]
    max_tokens: int
    first_position: int = 0

    @property
    def hidden(self) -> int:
        return int(self.words.shape[1])


class NativeEncoder:
    """An encoder with its buffers and threads. Used by one thread at a time."""

    def __init__(self, table: EncoderTable, threads: int, isa: str | None = None) -> None:
        """isa: None uses RIDGELINE_ISA, or else the best available one."""
        self._handle: int | None = None
        self._library = load()
        self._table = table  # keeps the weights alive, which the library reads in place
        self.hidden = table.hidden
        layers = (CEncoderLayer * len(table.layers))(*(_layer(each, table.hidden) for each in table.layers))
        encoder = _encoder(table, len(layers))
        encoder.layers = layers
        self._handle = self._library.rl_encoder_create(byref(encoder), choose_isa(isa).encode(), threads)
        if not self._handle:
            raise NativeError(f"the native library could not create this encoder: {last_error()}")
        self.isa: str = self._library.rl_encoder_isa(self._handle).decode()
        self.bytes = int(self._library.rl_encoder_bytes(self._handle))

    def execute(
        self,
        token_ids: Ints,
        text_starts: Ints,
        type_ids: Ints | None = None,
        *,
        pooling: Pooling = Pooling.MEAN,
        normalize: bool = True,
    ) -> Floats:
        """A vector per text, or with Pooling.NONE per token. Text t is tokens text_starts[t : t + 1]."""
        if self._handle is None:
            raise NativeError("this encoder is closed")
        tokens, texts = len(token_ids), len(text_starts) - 1
        out = np.empty((tokens if pooling is Pooling.NONE else max(texts, 0), self.hidden), np.float32)
        call = CTexts(
            tokens,
            texts,
            address(token_ids, np.int32, (tokens,), "token_ids"),
            None if type_ids is None else address(type_ids, np.int32, (tokens,), "type_ids"),
            address(text_starts, np.int32, (texts + 1,), "text_starts"),
        )
        if self._library.rl_encoder_execute(self._handle, byref(call), pooling, normalize, out.ctypes.data):
            raise NativeError(last_error())
        return out

    def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.rl_encoder_free(handle)

    def __del__(self) -> None:
        self.close()


def _layer(layer: EncoderLayerTable, hidden: int) -> CEncoderLayer:
    fields = {name: getattr(layer, name).as_c() for name in ENCODER_MATRICES}
    norms = {name: address(getattr(layer, name), np.float32, (hidden,), name) for name in ENCODER_NORMS}
    return CEncoderLayer(**fields, **norms)


def _encoder(table: EncoderTable, num_layers: int) -> CEncoder:
    hidden, types = table.hidden, 0 if table.type_rows is None else len(table.type_rows)
    ffn = table.layers[0].up.n if table.layers else 0
    return CEncoder(
        hidden=hidden,
        heads=table.heads,
        ffn=ffn,
        vocab=len(table.words),
        types=types,
        num_layers=num_layers,
        max_positions=len(table.positions),
        first_position=table.first_position,
        activation=table.activation,
        max_tokens=table.max_tokens,
        norm_eps=table.norm_eps,
        words=address(table.words, np.float32, (len(table.words), hidden), "words"),
        positions=address(table.positions, np.float32, (len(table.positions), hidden), "positions"),
        type_rows=(
            None
            if table.type_rows is None
            else address(table.type_rows, np.float32, (types, hidden), "type_rows")
        ),
        norm=address(table.norm, np.float32, (hidden,), "norm"),
        norm_bias=address(table.norm_bias, np.float32, (hidden,), "norm_bias"),
    )
