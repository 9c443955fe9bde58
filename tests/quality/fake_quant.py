"""The native library's arithmetic in torch: weights from their packed bytes, inputs rounded the same way.

`dequantized` reads a packed matrix by the layout of native/src/formats.h, with no call into the library.
FakeQuant is a backend of the torch decoder that rounds the inputs of every linear layer, and keys, values and
queries, to the forms that the library uses; all else is float32. The rest is the kernels' error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.torch_weights import DecoderWeights, LayerWeights, Weight
from ridgeline.ops import reference
from ridgeline.ops.backend import select_backend
from ridgeline.ops.cpu.library import BLOCK_TOKENS, DecoderTable, Format, KvFormat, PackedMatrix
from ridgeline.ops.cpu.tables import NormTable
from ridgeline.ops.inputs import InputRow, StepInputs

PANEL, GROUP, SUPER = 16, 32, 256
FOUR_BIT = (Format.Q4_H, Format.Q4_HM, Format.Q4_K, Format.Q4_Z)
F8_GROUP = 128

Floats = NDArray[np.float32]


class Inputs(Enum):
    """The form of the inputs of quantized layers, by the rows of a step; docs/native-kernels.md."""

    TWO_LIMBS = "15 bits"  # one row, or deterministic
    ONE_LIMB = "8 bits"  # from two rows on
    EXPANDED = "8 bits, 4-bit weights as bytes"  # AVX-512 and AVX-VNNI, from 96 rows on
    CODED = "8 bits, 4- and 6-bit weights with integer scales"  # AVX2, from 96 rows on


# ---- weights ----


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """w = scale · q + minimum; [n, groups, 32] and twice [n, groups, 1] (Q6_K: 32)."""

    q: Floats
    scale: Floats
    minimum: Floats

    def weights(self, n: int, k: int) -> Floats:
        whole: Floats = (self.scale * self.q + self.minimum).reshape(len(self.q), -1)[:n, :k]
        return np.ascontiguousarray(whole)


def dequantized(matrix: PackedMatrix, inputs: Inputs | None = None) -> Floats:
    """[n, k], from the packed bytes. inputs: as the library changes the weights for inputs of this form."""
    n, k = matrix.n, matrix.k
    panels, padded = -(-n // PANEL), -(-k // GROUP) * GROUP
    data = np.frombuffer(matrix.data, np.uint8).reshape(panels, -1)
    if matrix.format is Format.F32:
        whole = data.view(np.float32).reshape(panels, padded, PANEL).transpose(0, 2, 1)
        return np.ascontiguousarray(whole.reshape(-1, padded)[:n, :k])
    if matrix.format is Format.BF16:
        pairs = data.view(np.uint16).reshape(panels, padded // 2, PANEL, 2).transpose(0, 2, 1, 3)
        wide = pairs.reshape(-1, padded)[:n, :k].astype(np.uint32) << 16
        return np.ascontiguousarray(wide).view(np.float32)
    if matrix.format is Format.F8:
        return _eight_bit_floats(data, panels, padded)[:n, :k]
    groups = _groups(matrix.format, data, panels, padded)
    if inputs is Inputs.EXPANDED and matrix.format in FOUR_BIT:
        groups = _as_bytes(groups)
    if inputs is Inputs.CODED and matrix.format in (*FOUR_BIT, Format.Q6_K):
        groups = _with_codes(groups, matrix.format)
    return groups.weights(n, k)


def _eight_bit_floats(data: NDArray[np.uint8], panels: int, padded: int) -> Floats:
    """[k / 128][16] float scales, then [k / 2][16][2] E4M3 numbers."""
    count = -(-padded // F8_GROUP)
    scales = np.ascontiguousarray(data[:, : count * PANEL * 4]).view(np.float32).reshape(panels, count, PANEL)
    codes = data[:, count * PANEL * 4 :][:, : padded * PANEL].reshape(panels, padded // 2, PANEL, 2)
    rows = np.ascontiguousarray(codes.transpose(0, 2, 1, 3)).reshape(panels * PANEL, padded)
    values = torch.from_numpy(rows).view(torch.float8_e4m3fn).float().numpy()
    wide = scales.transpose(0, 2, 1).reshape(panels * PANEL, count).repeat(F8_GROUP, 1)[:, :padded]
    return np.ascontiguousarray(values * wide)


def _groups(format: Format, data: NDArray[np.uint8], panels: int, padded: int) -> Groups:
    count = padded // GROUP
    if format is Format.Q4_K:
        section = _super_section(GROUP, padded)
        scale, minimum = (_super_scales(data[:, start:], GROUP, padded) for start in (0, section))
        return Groups(_nibbles(data[:, 2 * section :], panels, padded), scale, -minimum)
    if format is Format.Q6_K:
        scale = _super_scales(data, GROUP // 2, padded).repeat(GROUP // 2, 1).reshape(-1, count, GROUP)
        return Groups(
            _six_bits(data[:, _super_section(GROUP // 2, padded) :], panels, count), scale, scale * -32
        )
    if format is Format.Q8_C:
        section = PANEL * 4
        scale = data[:, :section].view(np.float32).reshape(-1, 1, 1).repeat(count, 1)
        q = _quads(data[:, section:], panels, padded)
        return Groups(q, scale, scale * -128)
    item = np.dtype(np.float32 if format is Format.Q8_FM else np.float16)
    section = -(-count * PANEL * item.itemsize // 64) * 64

    def column(start: int) -> Floats:
        values = data[:, start : start + count * PANEL * item.itemsize].view(item)
        rows = values.reshape(panels, count, PANEL).transpose(0, 2, 1).reshape(-1, count, 1)
        return rows.astype(np.float32)

    scale = column(0)
    if format is Format.Q4_Z:
        zeros = data[:, section : section + count * PANEL].reshape(panels, count, PANEL).transpose(0, 2, 1)
        quants = data[:, section + -(-count * PANEL // 64) * 64 :]
        return Groups(_nibbles(quants, panels, padded), scale, -scale * zeros.reshape(-1, count, 1))
    has_minima = format in (Format.Q4_HM, Format.Q8_FM)
    quants = data[:, section * (2 if has_minima else 1) :]
    if format in FOUR_BIT:
        q = _nibbles(quants, panels, padded)
        return Groups(q, scale, column(section) if has_minima else scale * -8)
    return Groups(_quads(quants, panels, padded), scale, column(section) if has_minima else scale * -128)


def _quads(quants: NDArray[np.uint8], panels: int, padded: int) -> Floats:
    """[k / 4][16][4] bytes of each panel, as [rows, groups, 32]."""
    whole = quants[:, : padded * PANEL].reshape(panels, padded // 4, PANEL, 4).transpose(0, 2, 1, 3)
    return whole.reshape(panels * PANEL, -1, GROUP).astype(np.float32)


def _nibbles(quants: NDArray[np.uint8], panels: int, padded: int) -> Floats:
    """[k / 8][16][4] bytes: the low nibbles are one quad, the high nibbles the next."""
    whole = quants[:, : padded * PANEL // 2].reshape(panels, padded // 8, 1, PANEL, 4)
    both = np.concatenate([whole & 15, whole >> 4], 2)  # [panels, k / 8, 2, 16, 4]
    return both.transpose(0, 3, 1, 2, 4).reshape(panels * PANEL, -1, GROUP).astype(np.float32)


def _super_section(width: int, padded: int) -> int:
    """Bytes of the scales of a panel: for each 256 weights 16 units and, per `width` weights, 16 integers."""
    return -(-(-(-padded // SUPER) * PANEL * (2 + SUPER // width)) // 64) * 64


def _super_scales(data: NDArray[np.uint8], width: int, padded: int) -> Floats:
    """[rows, padded / width, 1]: unit times integer, which is signed for Q6_K (width 16)."""
    panels, supers, size = len(data), -(-padded // SUPER), PANEL * (2 + SUPER // width)
    section = data[:, : supers * size].reshape(panels, supers, size)
    units = np.ascontiguousarray(section[:, :, : 2 * PANEL]).view(np.float16).astype(np.float32)
    codes = np.ascontiguousarray(section[:, :, 2 * PANEL :]).view(np.int8 if width < GROUP else np.uint8)
    values = units[:, :, None, :] * codes.reshape(panels, supers, SUPER // width, PANEL).astype(np.float32)
    rows: Floats = values.transpose(0, 3, 1, 2).reshape(panels * PANEL, -1, 1)
    return rows[:, : padded // width]


def _six_bits(quants: NDArray[np.uint8], panels: int, count: int) -> Floats:
    """For each group the low nibbles as in Q4, and [2][16][4] bytes with the upper two bits of four quads."""
    bytes_each = GROUP * PANEL * 6 // 8
    whole = quants[:, : count * bytes_each].reshape(panels, count, bytes_each)
    low = whole[:, :, : GROUP * PANEL // 2].reshape(panels, count, GROUP // 8, 1, PANEL, 4)
    low = np.concatenate([low & 15, low >> 4], 3).reshape(panels, count, GROUP // 4, PANEL, 4)
    high = whole[:, :, GROUP * PANEL // 2 :].reshape(panels, count, 2, 1, PANEL, 4)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 1, 4, 1, 1)
    high = (high >> shifts & 3).reshape(panels, count, GROUP // 4, PANEL, 4)
    both = low | high << 4  # [panels, groups, quads, 16, 4]
    return both.transpose(0, 3, 1, 2, 4).reshape(panels * PANEL, count, GROUP).astype(np.float32)


def _as_bytes(groups: Groups) -> Groups:
    """linear_expanded.h: one scale per output; 64ths of a step, with half a step added, rounded down."""
    ends = np.maximum(np.abs(groups.minimum), np.abs(groups.scale * 15 + groups.minimum))
    most = ends.max((1, 2), keepdims=True)
    inverse = np.where(most > 1e-30, 127 / np.maximum(most, 1e-30), 0).astype(np.float32)
    step = np.rint(groups.scale * inverse * 1024)
    offset = np.rint(groups.minimum * inverse * 64 + (128 * 64 + 32))
    sixty_fourths = np.floor(groups.q * step / 16 + 0.5) + offset
    q = np.floor(sixty_fourths / 64).astype(np.float32)
    scale = (most / 127).astype(np.float32)
    return Groups(q, scale, scale * -128)


def _with_codes(groups: Groups, format: Format) -> Groups:
    """linear_coded.h: scales are whole steps of their output's largest of 24 groups."""
    top = np.float32(16383 if format is Format.Q6_K else 32767)
    scale = groups.scale.copy()
    for first in range(0, scale.shape[1], 24):
        part = scale[:, first : first + 24]
        most = np.maximum(np.abs(part).max((1, 2), keepdims=True), np.float32(1e-30))
        part[:] = np.rint(part * (top / most)) * (most / top)
    offset = {Format.Q4_H: -8, Format.Q6_K: -32}.get(format)
    return Groups(groups.q, scale, groups.minimum if offset is None else scale * offset)


# ---- inputs ----


def limbs(x: Tensor, top: float, group: int | None) -> Tensor:
    """Rounded to integers of at most `top` in size, with a scale per group, or per row if group is None."""
    rows, k = x.shape
    size = k if group is None else group
    padded = F.pad(x, (0, -k % size)).view(rows, -1, size)
    most = padded.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, top / most, 0)
    return (torch.round(padded * inverse) * (most / top)).view(rows, -1)[:, :k]


def small_steps(x: Tensor) -> Tensor:
    """Rows in 16 steps from a minimum, both bfloat16, the minimum rounded down. Padding counts as zeros."""
    padded = F.pad(x, (0, -x.shape[-1] % PANEL))
    low, high = padded.amin(-1, keepdim=True), padded.amax(-1, keepdim=True)
    start = low.bfloat16().float()
    bits = start.view(torch.int32)
    below = torch.where(start > 0, bits - 0x10000, torch.where(start < 0, bits + 0x10000, -0x7FFF0000))
    start = torch.where(start > low, below.view(torch.float32), start)
    step = ((high - start) / 15).bfloat16().float()
    inverse = torch.where(step > 1e-30, 1 / step, 0)
    return start + torch.round((x - start) * inverse) * step


class FakeQuant:
    """A Backend. Formats are those of the matrices given to `decoder_like`, by their tensors."""

    NAME = "fake-quant"

    def __init__(self, inputs: Inputs | None, kv: KvFormat) -> None:
        """inputs None: as they are."""
        self.inputs = inputs
        self._kv = kv
        self._formats: dict[int, Format] = {}
        self._exact = select_backend("torch")

    def __getattr__(self, name: str) -> Any:  # every op that rounds nothing
        return getattr(self._exact, name)

    def know(self, weight: Tensor, format: Format) -> Tensor:
        self._formats[weight.data_ptr()] = format
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(self._rounded(x, self._formats[weight.data_ptr()]), weight, bias)

    def gated_mlp(
        self, x: Tensor, gate_up: Tensor, down: Tensor, activation: Any, *biases: Tensor | None
    ) -> Tensor:
        gate, up = self.linear(x, gate_up, *biases[:1]).chunk(2, dim=-1)
        return self.linear(reference.activate(gate, activation) * up, down, *biases[1:])

    def write_kv(self, keys: Tensor, values: Tensor, kv: Tensor, slots: Tensor) -> None:
        self._exact.write_kv(self._kept(keys), self._kept(values), kv, slots)

    def paged_attention(self, q: Tensor, *others: Any, **options: Any) -> Tensor:
        if self._kv is KvFormat.BF16:
            q = q.bfloat16().float()
        return self._exact.paged_attention(q, *others, **options)

    def _rounded(self, x: Tensor, format: Format) -> Tensor:
        if self.inputs is None or format is Format.F32:
            return x
        if format is Format.F8:  # floats for one row
            return x if self.inputs is Inputs.TWO_LIMBS else x.bfloat16().float()
        if format is Format.BF16:
            return x.bfloat16().float()
        if format is Format.Q8_C:
            return limbs(x, 16256.0, None)
        return limbs(x, 16256.0 if self.inputs is Inputs.TWO_LIMBS else 127.0, GROUP)

    def _kept(self, x: Tensor) -> Tensor:
        if self._kv is KvFormat.BF16:
            return x.bfloat16().float()
        if self._kv is KvFormat.INT8:
            return limbs(x.reshape(-1, x.shape[-1]), 127.0, None).view(x.shape)
        if self._kv is KvFormat.INT4:
            return small_steps(x)
        return x


def fake_decoder(
    spec: ModelSpec, table: DecoderTable, inputs: Inputs | None, kv: KvFormat = KvFormat.F32
) -> Decoder:
    """The torch decoder over the table's weights, with its inputs in the library's form.

    For dense decoders with RMSNorm before attention and FFN, and a gated FFN without biases.
    """
    backend = FakeQuant(inputs, kv)
    changed = inputs in (Inputs.EXPANDED, Inputs.CODED)

    def weight(matrix: PackedMatrix | None, ffn: int = 0) -> Weight:
        assert matrix is not None
        values = dequantized(matrix, inputs)
        return Weight.dense(
            backend.know(torch.from_numpy(_gate_then_up(values, ffn) if ffn else values), matrix.format)
        )

    def norm(given: NormTable | None) -> Tensor:
        assert given is not None
        return torch.from_numpy(np.array(given.weight))

    def bias(matrix: PackedMatrix) -> Tensor | None:
        return None if matrix.bias is None else torch.from_numpy(np.array(matrix.bias))

    layers = [
        LayerWeights(
            qkv=weight(layer.qkv),
            qkv_bias=bias(layer.qkv),
            o=weight(layer.output),
            o_bias=bias(layer.output),
            attn_norm=norm(layer.attn_norm),
            ffn_norm=norm(layer.ffn_norm),
            gate_up=weight(layer.gate_up, layer.ffn),
            down=weight(layer.down),
        )
        for layer in table.layers
    ]
    embedding = Weight.dense(torch.from_numpy(dequantized(table.embedding)))
    # Tied or not, the head's inputs are rounded, and the embedding is only read.
    head = embedding if table.lm_head is table.embedding and not changed else weight(table.lm_head)
    backend.know(head.tensor, table.lm_head.format)
    weights = DecoderWeights(embedding, norm(table.final_norm), head, layers)
    return Decoder(spec, weights, backend, table.max_context)


def _gate_then_up(values: Floats, ffn: int) -> Floats:
    """Panels of 16 gate rows and 16 up rows alternate; torch has all gate rows first."""
    panels = values.reshape(-1, 2, PANEL, values.shape[1])
    return np.concatenate([panels[:, part].reshape(-1, values.shape[1])[:ffn] for part in (0, 1)])


def torch_logprobs(decoder: Decoder, tokens: NDArray[np.int32]) -> Floats:
    """[sequences, length, vocab] of sequences [sequences, length], each from its beginning."""
    found = []
    blocks = list(range(-(-tokens.shape[1] // BLOCK_TOKENS)))
    for sequence in tokens.tolist():
        kv = allocate_kv(decoder.spec, len(blocks), BLOCK_TOKENS, torch.float32)
        with torch.inference_mode():
            step = StepInputs.from_rows([InputRow(sequence, 0, blocks, logits_from=0)], BLOCK_TOKENS)
            found.append(torch.log_softmax(decoder.forward(step, kv).float(), -1).numpy())
    return np.stack(found)
