"""The feed-forward part of a layer: a dense FFN, or routed experts with their shared part.

A part of a LayerSpec, filled in by the readers. `matrix` counts weights that a token is multiplied with,
`vectors` those that are only added or used as scales. Holds no tensors and reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.models.errors import ImpossibleShape

Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]


@dataclass(frozen=True, slots=True)
class Dense:
    size: int
    gated: bool = True  # down(act(gate(x)) · up(x)); otherwise down(act(up(x)))
    bias: bool = False
    activation: Activation = "silu"

    @property
    def dense_size(self) -> int:
        return self.size

    def matrix(self, hidden: int) -> int:
        return (3 if self.gated else 2) * hidden * self.size

    def vectors(self, hidden: int) -> int:
        return ((2 if self.gated else 1) * self.size + hidden) if self.bias else 0


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts are chosen and weighted."""

    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"  # the first two: over all experts
    normalized: bool = True  # the chosen experts' weights are divided by their sum
    scale: float = 1.0  # multiplies the weights
    bias: bool = False  # added to the logits
    choice_bias: bool = False  # added to the scores for the choice alone
    groups: int = 1  # experts are chosen within the best `top_groups` groups
    top_groups: int = 1
    scales_input: bool = False  # Llama 4: weights multiply an expert's input, not its output
    # sparsemixer: the softmax is over experts whose logit is within this share of the best one left
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Experts:
    """`shared_size`: the part that every token uses besides its experts: shared experts or a dense branch."""

    num: int
    per_token: int
    size: int  # of one expert
    shared_size: int = 0
    activation: Activation = "silu"
    router: Router = Router()
    clamp: float | None = None  # gpt-oss: gate and up are limited, and up is used as up + 1
    gated: bool = True
    shared_gate: bool = False  # a learned scalar per token scales the shared expert
    bias: bool = False  # of every expert's matrices
    latent_size: int | None = None  # experts work in a narrower space, with projections into and out of it
    other_vectors: int = 0  # norms and scales around router and experts

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.num:
            raise ImpossibleShape(f"a token cannot use {self.per_token} of {self.num} experts")

    @property
    def dense_size(self) -> int:
        return self.shared_size

    def expert_matrix(self, hidden: int) -> int:
        """Weights of one routed expert."""
        return (3 if self.gated else 2) * self.size * (self.latent_size or hidden)

    def one_expert(self, hidden: int) -> int:
        """Matrices and biases of one routed expert."""
        biases = (2 if self.gated else 1) * self.size + (self.latent_size or hidden)
        return self.expert_matrix(hidden) + (biases if self.bias else 0)

    def matrix(self, hidden: int) -> int:
        """Without the routed experts: router, shared expert, projections into and out of the latent space."""
        shared = (3 if self.gated else 2) * self.shared_size
        latent = 2 * (self.latent_size or 0)
        return hidden * (shared + latent + self.num + (1 if self.shared_gate else 0))

    def vectors(self, hidden: int) -> int:
        del hidden
        return (
            self.other_vectors
            + (self.num if self.router.bias else 0)
            + (self.num if self.router.choice_bias else 0)
        )

    def expected_distinct(self, tokens: float) -> float:
        """How many experts `tokens` tokens use if each chooses `per_token` of `num` uniformly at random."""
        missed: float = (1 - self.per_token / self.num) ** tokens
        return self.num * (1 - missed)


Ffn = Dense | Experts
