"""Hadamard folding: rotates the residual stream and the values of every head, so that no channel stands out.

With an orthogonal R, a model that computes with x R instead of x gives the same logits: matrices that read
the stream become W R, those that write to it Rᵀ W, embeddings E R (QuaRot, arXiv 2404.00456, without its
online part). RMSNorm commutes with R only without weights, so these are folded into the readers first. A
model with other norms, norms after its parts, or a hidden size without a Hadamard matrix is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.lab.errors import BadInput
from ridgeline.lab.quantize.checkpoint import Checkpoint, StoredPiece, Tensors
from ridgeline.models.spec.mixers import Attention

_STREAM_READERS = (
    *("q", "k", "v", "gate", "up", "router", "shared_gate", "shared_up", "shared_scale"),
    *("expert_gate", "expert_up"),
)
_STREAM_WRITERS = ("o", "down", "shared_down", "expert_down")


class Rotation:
    """The rotation of one model, folded into its tensors a layer at a time."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        _refuse(checkpoint)
        spec = checkpoint.spec
        self._checkpoint = checkpoint
        generator = torch.Generator().manual_seed(seed)
        self.stream = _rotation(spec.hidden_size, generator, f"the hidden size {spec.hidden_size}")
        sizes = sorted({mixer.head_dim for mixer in spec.attentions})
        self._heads = {size: _rotation(size, generator, f"the head size {size}") for size in sizes}

    def fold_top(self, tensors: Tensors) -> None:
        """Embeddings, final norm and head, in place. A tied head becomes a separate tensor: `lm_head`."""
        (embed,) = self._checkpoint.find(None, "embed")
        (norm,) = self._checkpoint.find(None, "final_norm")
        heads = self._checkpoint.find(None, "lm_head")
        head = tensors[heads[0].name] if heads else tensors[embed.name]
        folded = _product(head * self._weights(tensors, norm), self.stream)
        for stored in (embed, *self._checkpoint.find(None, "positions")):
            tensors[stored.name] = _product(tensors[stored.name], self.stream)
        tensors[heads[0].name if heads else "lm_head"] = folded
        self._reset(tensors, norm)

    def fold_layer(self, number: int, tensors: Tensors) -> None:
        find = self._checkpoint.find
        norms = self._checkpoint.spec.layers[number].norms
        roles = {"attn_norm": ("q", "k", "v"), "ffn_norm": _STREAM_READERS[3:]}
        if norms.shared:
            roles = {"attn_norm": _STREAM_READERS}
        for norm_role, readers in roles.items():
            (norm,) = find(number, norm_role)
            for name in dict.fromkeys(one.name for one in find(number, *readers)):
                tensors[name] = _product(tensors[name] * self._weights(tensors, norm), self.stream)
            self._reset(tensors, norm)
        for stored in find(number, *_STREAM_WRITERS):
            tensors[stored.name] = _product(self.stream.T, tensors[stored.name])
        for stored in find(number, *(f"{role}_bias" for role in _STREAM_WRITERS)):
            tensors[stored.name] = _product(self.stream.T, tensors[stored.name][:, None])[:, 0]
        self._fold_values(number, tensors)

    def _fold_values(self, number: int, tensors: Tensors) -> None:
        """v of each head becomes Hᵀ v, and o undoes it: attention is linear in values."""
        mixer = self._checkpoint.spec.layers[number].mixer
        assert isinstance(mixer, Attention)
        turn = self._heads[mixer.head_dim].double()
        for stored in self._checkpoint.find(number, "v", "v_bias"):
            rows = slice(None) if stored.rows is None else stored.rows
            held = tensors[stored.name][rows].double()
            heads = held.view(mixer.kv_heads, mixer.head_dim, -1)
            tensors[stored.name][rows] = torch.matmul(turn.T, heads).view(held.shape).float()
        for stored in self._checkpoint.find(number, "o"):
            held = tensors[stored.name].double()
            heads = held.view(len(held), mixer.heads, mixer.head_dim)
            tensors[stored.name] = torch.matmul(heads, turn).view(held.shape).float()

    def _weights(self, tensors: Tensors, norm: StoredPiece) -> Tensor:
        return tensors[norm.name] + self._checkpoint.spec.norm.offset

    def _reset(self, tensors: Tensors, norm: StoredPiece) -> None:
        tensors[norm.name] = torch.full_like(tensors[norm.name], 1.0 - self._checkpoint.spec.norm.offset)


def hadamard_matrix(size: int) -> Tensor | None:
    """A matrix of ±1 with orthogonal rows, [size, size]; None if none is known here.

    Products of powers of two and of Paley's matrices: 12, 20, 24, 28, 36, 44, …
    """
    if size == 1:
        return torch.ones(1, 1)
    if size % 2 == 0 and (half := hadamard_matrix(size // 2)) is not None:
        return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), half)
    for part in (part for part in range(12, size + 1, 4) if size % part == 0):
        factor = _paley(part)
        if factor is not None and (rest := hadamard_matrix(size // part)) is not None:
            return torch.kron(factor, rest)
    return None


def _paley(size: int) -> Tensor | None:
    """Paley's constructions, from the squares modulo a prime q: q + 1 for q = 3 mod 4, else 2 (q + 1)."""
    if _is_prime(size - 1) and (size - 1) % 4 == 3:
        signs = _bordered(size - 1, -1.0)
        return signs + torch.eye(size)
    half = size // 2
    if size % 4 == 0 and _is_prime(half - 1) and (half - 1) % 4 == 1:
        signs, one = _bordered(half - 1, 1.0), torch.eye(half)
        return torch.kron(signs, torch.tensor([[1.0, 1.0], [1.0, -1.0]])) + torch.kron(
            one, torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        )
    return None


def _bordered(prime: int, left: float) -> Tensor:
    """The matrix of quadratic residues χ(i - j), below a row of ones and beside a column of `left`."""
    squares = {number * number % prime for number in range(1, prime)}
    signs = torch.tensor([0.0 if not n else 1.0 if n in squares else -1.0 for n in range(prime)])
    places = (torch.arange(prime)[:, None] - torch.arange(prime)) % prime
    out = torch.ones(prime + 1, prime + 1)
    out[0, 0], out[1:, 0], out[1:, 1:] = 0.0, left, signs[places]
    return out


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % part for part in range(2, int(number**0.5) + 1))


def _rotation(size: int, generator: torch.Generator, words: str) -> Tensor:
    """Orthogonal: random signs, then a Hadamard matrix."""
    matrix = hadamard_matrix(size)
    if matrix is None:
        raise BadInput(f"--method hadamard: no Hadamard matrix is known for {words}; use gptq or awq")
    signs = torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1
    turned: Tensor = signs[:, None] * matrix / size**0.5
    return turned


def _product(left: Tensor, right: Tensor) -> Tensor:
    """In float64, part by part: a fold must not cost what rounding costs."""
    out = torch.empty(len(left), right.shape[1])
    wide = right.double()
    for first in range(0, len(left), 4096):
        out[first : first + 4096] = (left[first : first + 4096].double() @ wide).float()
    return out


def _refuse(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    reason = ""
    if spec.norm.kind != "rms" or spec.norm.bias:
        reason = "its norms are not RMSNorm: they subtract the mean, which a rotation changes"
    elif any(layer.norms.after or not layer.norms.before for layer in spec.layers):
        reason = "it has norms after attention or FFN, whose weights cannot be folded into a matrix"
    if reason:
        raise BadInput(f"{checkpoint.path}: --method hadamard does not fit this model: {reason}")
