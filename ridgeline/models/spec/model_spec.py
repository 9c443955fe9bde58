"""ModelSpec: the only description of a model, layer by layer, from config.json or GGUF metadata.

The loader, the backends, the memory plan, the planner and the docs use this object: what is computed, and how
much of everything there is. `readers` makes it, `families` is the table of served families. A spec can
describe more than can be served; `families.check_servable` decides. Holds no tensors and reads no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.quantized.config import QuantScheme
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.precision import Precision, as_precision, bytes_of
from ridgeline.models.spec.rope import RopeSpec

SIXTEEN_BITS = Precision("bfloat16", "bfloat16")


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norm that all layers and the output have."""

    eps: float = 1e-5
    kind: Literal["rms", "layer"] = "rms"  # LayerNorm also subtracts the mean
    bias: bool = False
    offset: float = 0.0  # Gemma in HF layout stores norms as w, applied as (1 + w); GGUF stores 1 + w


@dataclass(frozen=True, slots=True)
class ExtraWeights:
    """Weights outside the decode path, counted separately."""

    name: str  # "vision tower", "MTP"
    parameters: int
    resident: bool  # in memory whenever the model is served; otherwise only on request


@dataclass(frozen=True)
class ModelSpec:
    family: str
    name: str
    hidden_size: int
    vocab_size: int
    max_context: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec = NormSpec()
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden)
    residual_scale: float = 1.0  # Granite: multiplies what a layer's parts add to the residual
    logit_scale: float = 1.0  # Cohere, Granite: multiplies the logits, before a softcap
    logit_softcap: float | None = None
    learned_positions: int = 0  # GPT-2: rows of a table that is added to the embeddings
    tied_embeddings: bool = True
    head_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    weight_format: str = "float32"  # as stored: float32, float16, bfloat16, fp8, gguf:Q4_1, …
    quantization: QuantScheme | None = None  # the same by matrix, of a checkpoint in safetensors
    kv_asked: str = ""  # the type that the checkpoint asks the KV cache to have
    stored: Precision = SIXTEEN_BITS  # the same by part, as `find_spec` reads it
    stored_bytes: int | None = None  # size of the weights on disk, if the files were read
    extra_parameters: tuple[ExtraWeights, ...] = ()
    other: int = 0  # parameters besides layers, embeddings and final norm
    notes: tuple[str, ...] = ()  # what the reader left out, for display

    def __post_init__(self) -> None:
        for size in ("hidden_size", "vocab_size", "max_context", "num_layers"):
            if getattr(self, size) < 1:
                raise BrokenModel(f"{self.name}: {size} is {getattr(self, size)}; it must be at least 1")

    @cached_property
    def kinds(self) -> tuple[tuple[LayerSpec, int], ...]:
        """Each different layer with the number of times it occurs."""
        return tuple(Counter(self.layers).items())

    # ---- parameters ----

    @cached_property
    def parameters(self) -> int:
        """All parameters without extras: embeddings, layers, final norm, LM head unless tied."""
        matrices = self.projection_parameters + self.dense_parameters + self.expert_parameters
        return self.embedding_parameters + matrices + self.small_parameters

    @cached_property
    def active_parameters(self) -> int:
        """`parameters` with only the experts that one token uses."""
        chosen = sum(
            count * layer.ffn.per_token * layer.ffn.one_expert(self.hidden_size)
            for layer, count in self.kinds
            if isinstance(layer.ffn, Experts)
        )
        return self.parameters - self.expert_parameters + chosen

    @property
    def embedding_parameters(self) -> int:
        tables = 1 if self.tied_embeddings else 2
        return (tables * self.vocab_size + self.learned_positions) * self.hidden_size

    @cached_property
    def projection_parameters(self) -> int:
        """Matrices of attention, linear attention and state-space layers."""
        return sum(count * layer.projections(self.hidden_size) for layer, count in self.kinds)

    @cached_property
    def dense_parameters(self) -> int:
        """Matrices of dense FFNs and shared experts."""
        return sum(count * layer.dense(self.hidden_size) for layer, count in self.kinds)

    @cached_property
    def expert_parameters(self) -> int:
        return sum(count * layer.experts(self.hidden_size) for layer, count in self.kinds)

    @cached_property
    def small_parameters(self) -> int:
        """Norms, biases, routers and the like."""
        layers = sum(count * layer.small(self.hidden_size) for layer, count in self.kinds)
        final_norm = (2 if self.norm.bias else 1) * self.hidden_size
        head_bias = self.vocab_size if self.head_bias else 0
        return layers + final_norm + head_bias + self.other

    @property
    def is_mixture(self) -> bool:
        return self.expert_parameters > 0

    # ---- the attention of a served model: one shape in all layers ----

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """Each layer's mixer, for models whose layers are all softmax attention."""
        mixers = tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))
        if len(mixers) != len(self.layers):
            raise UnsupportedModel(f"{self.name}: has layers without softmax attention")
        return mixers

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return max(mixer.heads for mixer in self.attentions)

    @property
    def num_kv_heads(self) -> int:
        return max(mixer.kv_heads for mixer in self.attentions)

    @property
    def head_dim(self) -> int:
        return max(mixer.head_dim for mixer in self.attentions)

    @property
    def ffn_size(self) -> int:
        """Of the widest dense FFN, or of the widest part of experts that every token uses."""
        return max((layer.ffn.dense_size for layer in self.layers if layer.ffn is not None), default=0)

    # ---- bytes of weights ----

    def weight_bytes(self, precision: Precision | str) -> int:
        """In memory when served: all parameters, and the resident extras at 16 bits.

        A precision's bare name means what checkpoints of that name contain; see Precision.
        """
        kept = as_precision(precision)
        rest = self.embedding_parameters + self.small_parameters
        resident = sum(extra.parameters for extra in self.extra_parameters if extra.resident)
        return round(
            self.projection_parameters * bytes_of(kept.attention)
            + self.dense_parameters * bytes_of(kept.linear)
            + self.expert_parameters * bytes_of(kept.experts)
            + (rest + resident) * bytes_of(kept.rest)
        )

    def weight_bytes_read(self, precision: Precision | str, batch_tokens: float) -> float:
        """Read by one forward pass over `batch_tokens` tokens.

        Dense weights and LM head once, one row of the embeddings per token, and as many of each layer's
        experts as the tokens are expected to use: E · (1 − (1 − k/E)^tokens).
        """
        kept = as_precision(precision)
        head = self.vocab_size * self.hidden_size
        rows = min(batch_tokens, self.vocab_size) * self.hidden_size
        experts = sum(
            count * layer.ffn.expected_distinct(batch_tokens) * layer.ffn.one_expert(self.hidden_size)
            for layer, count in self.kinds
            if isinstance(layer.ffn, Experts)
        )
        return (
            self.projection_parameters * bytes_of(kept.attention)
            + self.dense_parameters * bytes_of(kept.linear)
            + experts * bytes_of(kept.experts)
            + (head + rows + self.small_parameters) * bytes_of(kept.rest)
        )

    # ---- FLOPs: a multiplication and an addition count as two ----

    @cached_property
    def matmul_parameters(self) -> int:
        """Weights one token is multiplied with in the layers: active experts, no embeddings or LM head."""
        hidden = self.hidden_size
        total = self.projection_parameters + self.dense_parameters
        for layer, count in self.kinds:
            if isinstance(layer.ffn, Experts):
                chosen = layer.ffn.per_token * layer.ffn.expert_matrix(hidden)
                total += count * (chosen + hidden * layer.ffn.num)
        return total

    @property
    def lm_head_flops(self) -> int:
        return 2 * self.hidden_size * self.vocab_size

    def attention_flops(self, new_tokens: int, context: int = 0) -> int:
        """Only the mixing of tokens, for `new_tokens` after `context` cached ones."""
        return sum(
            count * layer.mixer.flops(new_tokens, context)
            for layer, count in self.kinds
            if layer.mixer is not None
        )

    def flops(self, new_tokens: int, context: int = 0) -> int:
        """A forward pass of `new_tokens` after `context` cached ones, the LM head once."""
        return (
            2 * new_tokens * self.matmul_parameters
            + self.attention_flops(new_tokens, context)
            + self.lm_head_flops
        )

    @property
    def matmul_flops_per_token(self) -> int:
        """2 · matmul_parameters: every layer's projections and FFN, without attention and LM head."""
        return 2 * self.matmul_parameters

    def prefill_flops(self, tokens: int, context: int = 0) -> int:
        """Computing `tokens` prompt tokens after `context` cached ones, and sampling once at the end."""
        return self.flops(tokens, context)

    def decode_flops(self, context: int) -> int:
        """One decode step of one sequence of `context` tokens, the new one included."""
        return self.flops(1, context - 1)

    def prefill_flops_per_token(self, tokens: int) -> float:
        """Mean over a prompt of `tokens` tokens without cached ones."""
        return self.flops(tokens) / tokens

    def kv_tokens_seen(self, context: int) -> int:
        """Cached tokens one decode step reads, over all layers; `context` counts its own."""
        return sum(mixer.tokens_seen(context) for mixer in self.attentions)


def longest_context(stated: int, ropes: Iterable[RopeSpec | None]) -> int:
    """`stated`, or more if yarn extends it: such configs often keep the trained length."""
    scalings = [rope.scaling for rope in ropes if rope is not None and rope.scaling is not None]
    stretched = (
        int(scaling.original_context * scaling.factor)
        for scaling in scalings
        if scaling.kind == "yarn" and scaling.original_context is not None
    )
    limits = [scaling.last_position for scaling in scalings if scaling.last_position is not None]
    return min(max(stated, *stretched, 0), *limits) if limits else max(stated, *stretched, 0)
