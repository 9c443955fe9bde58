"""The cost of one forward pass by operator: operations, bytes of memory, bytes over the link.

Called by `roofline` and `plan`. Costs are those of one of `tp` chips that share every matrix; layers of one
kind are summed. Counts the minimum traffic: every weight and cached token once, every activation once in and
once out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.models.spec.cache_layout import CacheElement, CacheGroup
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention, CompressedAttention, LatentAttention, Mixer
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision, as_precision, bytes_of

Phase = Literal["prefill", "decode"]

ACTIVATION_BYTES = 2
ORDER = ("qkv", "attention", "o", "ffn", "experts", "norms", "lm_head", "all-reduce")


@dataclass(frozen=True, slots=True)
class OperatorCost:
    name: str
    flops: float
    bytes: float
    weight_format: str = "bfloat16"  # determines the arithmetic unit
    link_bytes: float = 0.0  # sent by each chip to the others

    @property
    def intensity(self) -> float:
        """Operations per byte of memory; 0 for pure data movement."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: OperatorCost) -> OperatorCost:
        return OperatorCost(
            self.name,
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.weight_format,
            self.link_bytes + other.link_bytes,
        )


def operators(
    shape: ModelSpec,
    phase: Phase,
    batch: int,
    new_tokens: int,
    context: int,
    precision: Precision | str,
    kv_precision: str = "bfloat16",
    tp: int = 1,
) -> list[OperatorCost]:
    """A pass over `batch` sequences with `context` cached tokens each; a decode step adds one token to each.

    In a prefill the LM head is applied once per sequence.
    """
    each = 1 if phase == "decode" else new_tokens
    step = _Step(shape.hidden_size, batch, each, context, as_precision(precision), bytes_of(kv_precision), tp)
    costs: dict[str, OperatorCost] = {}
    for layer, count in shape.kinds:
        for cost in step.layer(layer):
            scaled = OperatorCost(
                cost.name, count * cost.flops, count * cost.bytes, cost.weight_format, count * cost.link_bytes
            )
            costs[cost.name] = costs[cost.name] + scaled if cost.name in costs else scaled
    costs["lm_head"] = step.matrix(
        "lm_head", shape.vocab_size * shape.hidden_size, step.precision.rest, batch
    )
    return [costs[name] for name in ORDER if name in costs]


def kv_share(attention: Mixer, tp: int) -> float:
    """The share of a layer's cache that each of `tp` chips stores and reads.

    Heads are split; with fewer KV heads than chips some chips store the same ones. The latent vector of MLA
    and the entries of compressed attention belong to all heads, so every chip stores them in full.
    """
    if isinstance(attention, LatentAttention | CompressedAttention):
        return 1.0
    if isinstance(attention, Attention):
        return 1 / min(tp, attention.kv_heads)
    return 1 / tp


def all_reduce_bytes(tokens: float, hidden: int, tp: int) -> float:
    """Sent by each chip in an all-reduce of an activation of `tokens` rows, as a ring or in two halves."""
    return 2 * (tp - 1) / tp * tokens * hidden * ACTIVATION_BYTES


@dataclass(frozen=True, slots=True)
class _Step:
    hidden: int
    batch: int
    each: int  # new tokens per sequence
    context: int
    precision: Precision
    kv_bytes: float
    tp: int

    @property
    def tokens(self) -> int:
        return self.batch * self.each

    def layer(self, layer: LayerSpec) -> list[OperatorCost]:
        costs = []
        halves = 0
        if layer.mixer is not None:
            halves += 1
            costs += [
                self.matrix("qkv", layer.mixer.input_matrix(self.hidden), self.precision.attention),
                self.mixing(layer.mixer),
                self.matrix("o", layer.mixer.output_matrix(self.hidden), self.precision.attention),
            ]
        if layer.ffn is not None:
            halves += 1
            costs += self.feed_forward(layer)
        moved = 2 * layer.norm_count * self.tokens * self.hidden * ACTIVATION_BYTES
        costs.append(OperatorCost("norms", 0.0, moved))
        if self.tp > 1:
            sent = halves * all_reduce_bytes(self.tokens, self.hidden, self.tp)
            costs.append(OperatorCost("all-reduce", 0.0, 0.0, link_bytes=sent))
        return costs

    def matrix(self, name: str, weights: int, weight_format: str, rows: int | None = None) -> OperatorCost:
        """`rows` activations times a matrix of `weights` numbers, its columns split over the chips."""
        rows = self.tokens if rows is None else rows
        moved = rows * (self.hidden + weights / self.hidden / self.tp) * ACTIVATION_BYTES
        stored = weights * bytes_of(weight_format) / self.tp
        return OperatorCost(name, 2 * rows * weights / self.tp, stored + moved, weight_format)

    def mixing(self, attention: Mixer) -> OperatorCost:
        """Reads the cache once and writes the new tokens' entries; queries and outputs pass through."""
        group = CacheGroup(attention, 1, CacheElement(self.kv_bytes))
        length = self.context + self.each
        if self.each == 1:
            cached = group.read(length)
        else:
            cached = group.kept(length)
        written = self.each * group.token_bytes
        cache = self.batch * (cached + written) * kv_share(attention, self.tp)
        passing = 2 * self.tokens * attention.output_matrix(self.hidden) / self.hidden / self.tp
        flops = self.batch * attention.flops(self.each, self.context) / self.tp
        return OperatorCost("attention", flops, cache + passing * ACTIVATION_BYTES)

    def feed_forward(self, layer: LayerSpec) -> list[OperatorCost]:
        ffn = layer.ffn
        costs = []
        if dense := layer.dense(self.hidden):
            costs.append(self.matrix("ffn", dense, self.precision.linear))
        if isinstance(ffn, Experts):
            width = ffn.latent_size or self.hidden
            read = ffn.expected_distinct(self.tokens) * ffn.one_expert(self.hidden)
            router = self.hidden * ffn.num * ACTIVATION_BYTES
            inner = (2 if ffn.gated else 1) * ffn.size
            moved = self.tokens * ffn.per_token * (2 * width + inner + ffn.size) * ACTIVATION_BYTES
            flops = 2 * self.tokens * (ffn.per_token * ffn.expert_matrix(self.hidden) + self.hidden * ffn.num)
            stored = read * bytes_of(self.precision.experts) + router
            experts = OperatorCost(
                "experts", flops / self.tp, (stored + moved) / self.tp, self.precision.experts
            )
            costs.append(experts)
        return costs
