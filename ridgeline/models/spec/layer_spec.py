"""LayerSpec: one layer of a model as a mixer, an ffn and the norms around them, with their counts.

A ModelSpec has one for each layer. Pure data: holds no tensors and reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.models.spec.ffn import Experts, Ffn
from ridgeline.models.spec.mixers import Mixer


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms around a layer's mixer and ffn, and how the two are connected."""

    before: bool = True  # of each part's input
    after: bool = False  # of each part's output, before it is added to the residual
    parallel: bool = False  # both parts read the layer's input, and their outputs are added together
    shared: bool = False  # in a parallel layer: one norm for both parts
    vectors: int = 1  # of a norm: its weight, or its weight and its bias
    others: int = 0  # further norms of the same width: counted, not computed


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: mixes tokens, or has a feed-forward part, or both."""

    mixer: Mixer | None
    ffn: Ffn | None
    norms: Norms = Norms()
    other: int = 0  # parameters that belong to neither half

    @property
    def norm_count(self) -> int:
        """Norms as wide as the residual stream."""
        parts = (self.mixer is not None) + (self.ffn is not None)
        before = 0 if not self.norms.before else 1 if self.norms.shared else parts
        return before + (parts if self.norms.after else 0) + self.norms.others

    def parameters(self, hidden: int) -> int:
        """Every weight of the layer."""
        return self.projections(hidden) + self.dense(hidden) + self.experts(hidden) + self.small(hidden)

    def projections(self, hidden: int) -> int:
        """Matrices around the mixing of tokens."""
        if self.mixer is None:
            return 0
        return self.mixer.input_matrix(hidden) + self.mixer.output_matrix(hidden)

    def dense(self, hidden: int) -> int:
        """Matrices of a dense FFN, or of the part shared by all tokens next to experts; no router."""
        if self.ffn is None:
            return 0
        return self.ffn.matrix(hidden) - (hidden * self.ffn.num if isinstance(self.ffn, Experts) else 0)

    def experts(self, hidden: int) -> int:
        """All routed experts."""
        return self.ffn.num * self.ffn.one_expert(hidden) if isinstance(self.ffn, Experts) else 0

    def small(self, hidden: int) -> int:
        """Norms, biases, the router: they stay at 16 bits when the rest is quantized."""
        total = self.norm_count * self.norms.vectors * hidden + self.other
        if self.mixer is not None:
            total += self.mixer.vectors(hidden)
        if self.ffn is not None:
            total += self.ffn.vectors(hidden)
        if isinstance(self.ffn, Experts):
            total += hidden * self.ffn.num
        return total
