"""Deployment: a model on chips under an engine, and the work of one step for one of those chips.

Made by the planner and by `measured`; `analytic` turns Work into seconds. Counts bytes, operations and calls
only, not speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.chip import Chip
from ridgeline.models.spec.cache_layout import CacheElement, CacheGroup
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.mixers import Attention, LatentAttention, Mixer
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision, as_precision, bytes_of
from ridgeline.models.spec.recurrences import LinearAttention, Mamba2

ACTIVATION_BYTES = 2
ENGINES = ("ridgeline", "vllm", "sglang", "trtllm")
# Share of a chip's memory for weights and cache; the rest is workspace and fragmentation.
USABLE_MEMORY = 0.9
KV_SCALE_BYTES = 4  # of ridgeline's cache in 8 and 4 bits: for each token, head, and key or value
NARROW = ("fp8", "fp4")  # arithmetic for which activations are quantized too


@dataclass(frozen=True)
class Deployment:
    shape: ModelSpec
    chip: Chip
    backend: str = "ridgeline"
    precision: Precision | str = "bfloat16"
    kv_precision: str = "bfloat16"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1
    moe_tp: int = 1

    def __post_init__(self) -> None:
        if self.backend not in ENGINES:
            raise BadInput(f"unknown engine {self.backend!r}; known are {', '.join(ENGINES)}")
        for name in ("tp", "pp", "ep", "attention_dp", "moe_tp"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1, not {getattr(self, name)}")

    # ---- how the model is spread ----

    @property
    def stage_gpus(self) -> int:
        """Chips that together hold one copy of a pipeline stage."""
        return max(self.tp * self.attention_dp, self.moe_tp * self.ep)

    @property
    def gpus(self) -> int:
        return self.stage_gpus * self.pp

    @property
    def attention_copies(self) -> int:
        """Groups that attend to different sequences: attention is replicated if experts are spread wider."""
        return max(self.stage_gpus // self.tp, 1)

    @cached_property
    def kept(self) -> Precision:
        return as_precision(self.precision)

    @cached_property
    def kv_element(self) -> CacheElement:
        size = bytes_of(self.kv_precision)
        scaled = self.backend == "ridgeline" and size <= 1
        return CacheElement(size, scale_bytes=KV_SCALE_BYTES if scaled else 0)

    @cached_property
    def link(self) -> float:
        """Bytes per second to the other chips of the group; 1.0, and unused, for one chip without a link."""
        within = self.stage_gpus <= self.chip.link_domain
        rate = self.chip.link_bytes_per_s if within else self.chip.internode_bytes_per_s
        if rate is None and self.stage_gpus > 1:
            raise BadInput(f"{self.chip.name}: no link known between {self.stage_gpus} chips")
        return rate or 1.0

    # ---- what one chip holds ----

    @cached_property
    def linear_bytes(self) -> float:
        """Weights every step reads: projections, dense FFNs, shared experts, LM head."""
        shape, kept = self.shape, self.kept
        matrices = shape.projection_parameters * bytes_of(kept.attention)
        matrices += shape.dense_parameters * bytes_of(kept.linear)
        rest = (shape.vocab_size * shape.hidden_size + shape.small_parameters) * bytes_of(kept.rest)
        return (matrices + rest) / self.tp

    @cached_property
    def all_bytes(self) -> float:
        """Weights in memory."""
        experts = self.shape.expert_parameters * bytes_of(self.kept.experts)
        embeddings = self.shape.vocab_size * self.shape.hidden_size * bytes_of(self.kept.rest)
        return (self.linear_bytes + embeddings / self.tp + experts / self.stage_gpus) / self.pp

    def kept_bytes(self, context: int) -> float:
        """Cache and states of one sequence, on each chip of the group that serves it."""
        total = 0.0
        for kind, count in self.mixers:
            # ridgeline keeps windowed layers in full.
            group = CacheGroup(kind, count, self.kv_element)
            total += group.kept(context, whole_windows=self.backend == "ridgeline") / self._split(kind)
        return total / self.pp

    def running(self, batch: float, context: int) -> float:
        """How many of `batch` sequences can run together; the others wait for cache space."""
        room = max(USABLE_MEMORY * self.chip.memory_bytes - self.all_bytes, 0.02 * self.chip.memory_bytes)
        fit = self.attention_copies * room / max(self.kept_bytes(context), 1.0)
        return max(min(batch, fit), 1.0)

    # ---- layers by kind ----

    @cached_property
    def mixers(self) -> tuple[tuple[Mixer, int], ...]:
        counts: dict[Mixer, int] = {}
        for layer, count in self.shape.kinds:
            if layer.mixer is not None:
                counts[layer.mixer] = counts.get(layer.mixer, 0) + count
        return tuple(counts.items())

    @cached_property
    def experts(self) -> tuple[tuple[Experts, int], ...]:
        return tuple(
            (layer.ffn, count) for layer, count in self.shape.kinds if isinstance(layer.ffn, Experts)
        )

    @property
    def expert_layers(self) -> int:
        return sum(count for _, count in self.experts)

    @property
    def latent_layers(self) -> int:
        return sum(count for kind, count in self.mixers if isinstance(kind, LatentAttention))

    @property
    def recurrent_layers(self) -> int:
        return sum(count for kind, count in self.mixers if isinstance(kind, LinearAttention | Mamba2))

    def _split(self, kind: Mixer) -> int:
        """Over how many chips of a group a layer's cache is divided; latents are replicated on each."""
        if isinstance(kind, Attention):
            return min(self.tp, kind.kv_heads)
        return 1 if isinstance(kind, LatentAttention) else self.tp

    # ---- rates and calls ----

    @cached_property
    def setting(self) -> Setting:
        chip, kept = self.chip, self.kept
        linear, experts = self._unit(kept.linear), self._unit(kept.experts)
        layers = len(self.shape.layers)
        return Setting(
            bytes_per_s=chip.bytes_per_s,
            linear_flops_per_s=chip.flops[linear],
            expert_flops_per_s=chip.flops[experts],
            attention_flops_per_s=chip.flops.get("bf16") or chip.flops_per_s("float32"),
            link_bytes_per_s=self.link,
            linear_narrow=float(linear in NARROW),
            expert_narrow=float(experts in NARROW),
            linear_int4=float(kept.linear == "int4"),
            expert_int4=float(kept.experts == "int4"),
            layers=layers,
            quantized_layers=layers if linear in NARROW else 0,
            latent_layers=self.latent_layers,
            recurrent_layers=self.recurrent_layers,
            expert_layers=self.expert_layers,
            reduction_hops=2 * layers * math.log2(self.tp),
            stage_hops=self.pp - 1,
        )

    def _unit(self, weight_format: str) -> str:
        """ridgeline's kernels multiply 4-bit floats in 16 bits."""
        unit = self.chip.unit(weight_format)
        return "bf16" if self.backend == "ridgeline" and unit == "fp4" else unit

    # ---- work ----

    def decode(self, batch: float, context: float) -> Work:
        """One token for each of `batch` sequences with `context` cached tokens."""
        shape, own = self.shape, max(batch / self.attention_copies, 1.0)
        hidden, seen = shape.hidden_size, max(round(context), 1)
        expert_bytes = sum(n * e.expected_distinct(batch) * e.one_expert(hidden) for e, n in self.experts)
        return Work(
            linear_bytes=self.linear_bytes,
            expert_bytes=expert_bytes * bytes_of(self.kept.experts) / self.stage_gpus,
            cache_bytes=own
            * sum(CacheGroup(k, n, self.kv_element).read(seen) / self._split(k) for k, n in self.mixers),
            linear_flops=own * (self._linear_flops + shape.lm_head_flops) / self.tp,
            expert_flops=batch * self._expert_flops / self.stage_gpus,
            attention_flops=own * sum(n * k.flops(1, seen) for k, n in self.mixers) / self.tp,
            reduced_bytes=own * self._reduced_bytes,
        )

    def prefill(self, tokens: float, context: float = 0, rows: float = 1) -> Work:
        """Prompt tokens of `rows` sequences, each with `context` cached tokens. Reads no weights: the decodes
        beside it do.
        """
        spread = self.tp * self.attention_copies
        each = max(round(tokens / rows), 1)
        attention = self.shape.attention_flops(each, round(context)) * (tokens / each)
        return Work(
            linear_flops=tokens * self._linear_flops / spread / self.pp,
            expert_flops=tokens * self._expert_flops / self.stage_gpus / self.pp,
            attention_flops=attention / spread / self.pp,
            reduced_bytes=tokens * self._reduced_bytes / self.attention_copies / self.pp,
        )

    @cached_property
    def _linear_flops(self) -> float:
        return 2.0 * (self.shape.projection_parameters + self.shape.dense_parameters)

    @cached_property
    def _expert_flops(self) -> float:
        hidden = self.shape.hidden_size
        return 2.0 * sum(n * e.per_token * e.expert_matrix(hidden) for e, n in self.experts)

    @cached_property
    def _reduced_bytes(self) -> float:
        """Sent by each chip per token: two all-reduces of its hidden state per layer."""
        layers = len(self.shape.layers)
        return 2 * layers * 2 * (self.tp - 1) / self.tp * self.shape.hidden_size * ACTIVATION_BYTES


@dataclass(frozen=True)
class Setting:
    """Rates of the chip and calls per pass; flags are 0 or 1. Fields may be arrays, like those of Work."""

    bytes_per_s: float
    linear_flops_per_s: float
    expert_flops_per_s: float
    attention_flops_per_s: float
    link_bytes_per_s: float
    linear_narrow: float  # multiplied at 8 or 4 bits
    expert_narrow: float
    linear_int4: float
    expert_int4: float
    layers: float
    quantized_layers: float  # layers where quantizing activations needs separate kernels
    latent_layers: float
    recurrent_layers: float
    expert_layers: float
    reduction_hops: float  # all-reduces times log2 of participants
    stage_hops: float


@dataclass(frozen=True)
class Work:
    """The work of one chip in a pass. Fields may be arrays of many passes, for fitting."""

    linear_bytes: float = 0.0
    expert_bytes: float = 0.0
    cache_bytes: float = 0.0
    linear_flops: float = 0.0
    expert_flops: float = 0.0
    attention_flops: float = 0.0
    reduced_bytes: float = 0.0
