"""Pairs of tensors between which a channel's scale can move without changing the layer's output.

A channel that a norm or a matrix makes is divided by s there and multiplied by s in every matrix that reads
it. AWQ and SmoothQuant choose s; here is where it goes. Exact in real numbers: a norm's weight is linear in
the channel, and so are attention in its values and a gated FFN in `up`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeline.lab.quantize.checkpoint import Checkpoint, StoredPiece, Tensors
from ridgeline.lab.quantize.inputs import Key, Statistics
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.mixers import Attention

_FFN_READERS = (
    "gate",
    "up",
    "router",
    "shared_gate",
    "shared_up",
    "shared_scale",
    "expert_gate",
    "expert_up",
)


@dataclass(frozen=True, slots=True)
class Scaling:
    """One place where channels can be scaled.

    makers:  pieces whose rows (of a norm: elements) make the channels
    readers: names of the stored matrices that read them
    inputs:  the matrices' inputs in the statistics, all divided by s; the first has seen every token
    repeats: neighbouring heads of readers that read the same channels (grouped queries), with the head's size
    """

    makers: list[StoredPiece]
    readers: list[str]
    inputs: list[Key]
    after_norm: bool
    repeats: tuple[int, int] = (1, 1)
    offset: float = 0.0  # added to a stored norm weight before it is used

    def made(self, of_inputs: Tensor) -> Tensor:
        """One value for each channel that is made, from those of the readers' inputs: the largest."""
        times, head = self.repeats
        if times == 1:
            return of_inputs
        return of_inputs.view(-1, times, head).amax(1).reshape(-1)

    def read(self, of_channels: Tensor) -> Tensor:
        """The same for each input of the readers."""
        times, head = self.repeats
        if times == 1:
            return of_channels
        return of_channels.view(-1, 1, head).expand(-1, times, head).reshape(-1)

    def apply(self, tensors: Tensors, statistics: Statistics, scales: Tensor) -> None:
        """scales: [channels made], positive."""
        for maker in self.makers:
            rows = slice(None) if maker.rows is None else maker.rows
            held = tensors[maker.name]
            by = scales if held.ndim == 1 else scales[:, None]
            shift = self.offset if maker.piece.is_norm else 0.0
            held[rows] = (held[rows] + shift) / by - shift
        wide = self.read(scales)
        for name in self.readers:
            tensors[name] *= wide
        for key in self.inputs:
            if (found := statistics.of(key)) is not None:
                found.divide(wide)


@dataclass(slots=True)
class _Found:
    checkpoint: Checkpoint
    number: int
    scalings: list[Scaling] = field(default_factory=list)

    def names(self, *roles: str, expert: int | None = None) -> list[str]:
        found = self.checkpoint.find(self.number, *roles)
        return list(dict.fromkeys(one.name for one in found if expert is None or one.piece.expert == expert))

    def makers(self, role: str, expert: int | None = None) -> list[StoredPiece]:
        """A weight's rows, and those of its bias."""
        found = self.checkpoint.find(self.number, role, f"{role}_bias")
        return [one for one in found if expert is None or one.piece.expert == expert]

    def keys(self, *fields: str) -> list[Key]:
        """router comes first: it sees every token, an expert only its own."""
        every = (one for name in self.checkpoint.names(self.number) for one in self.checkpoint.pieces(name))
        present = {(one.piece.field, one.piece.expert) for one in every if len(one.piece.shape) == 2}
        return sorted(
            (key for key in present if key[0] in fields), key=lambda key: (fields.index(key[0]), key[1] or 0)
        )


def scalings_of(checkpoint: Checkpoint, number: int) -> list[Scaling]:
    """Every scaling of a layer, in the order of the computation."""
    layer, found = checkpoint.spec.layers[number], _Found(checkpoint, number)
    mixer, ffn, norms = layer.mixer, layer.ffn, layer.norms
    assert isinstance(mixer, Attention)
    offset = checkpoint.spec.norm.offset
    attention, feeding = ["q", "k", "v"], list(_FFN_READERS)
    of_ffn = ("router", "gate_up", "up", "experts_gate_up", "shared_scale")
    scalings = found.scalings
    if norms.before:
        readers = attention + (feeding if norms.shared else [])
        keys = found.keys("qkv", *(of_ffn if norms.shared else ()))
        scalings.append(Scaling(found.makers("attn_norm"), found.names(*readers), keys, True, offset=offset))
    heads = (mixer.heads // mixer.kv_heads, mixer.head_dim)
    scalings.append(Scaling(found.makers("v"), found.names("o"), found.keys("o"), False, heads))
    if norms.before and not norms.shared:
        names, keys = found.names(*feeding), found.keys(*of_ffn)
        scalings.append(Scaling(found.makers("ffn_norm"), names, keys, True, offset=offset))
    if isinstance(ffn, Dense) and ffn.gated:
        scalings.append(Scaling(found.makers("up"), found.names("down"), found.keys("down"), False))
    if isinstance(ffn, Experts):
        if ffn.shared_size:
            names = found.names("shared_down")
            scalings.append(Scaling(found.makers("shared_up"), names, found.keys("down"), False))
        for expert in range(ffn.num if ffn.gated and ffn.clamp is None else 0):
            names = found.names("expert_down", expert=expert)
            keys = [("experts_down", expert)]
            scalings.append(Scaling(found.makers("expert_up", expert), names, list(keys), False))
    return scalings


def positive(scales: Tensor) -> Tensor:
    """Finite and positive; a channel without inputs or weights keeps its scale."""
    usable = torch.isfinite(scales) & (scales > 0)
    return torch.where(usable, scales, torch.ones_like(scales)).clamp(1e-4, 1e4)
