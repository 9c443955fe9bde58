"""ModelSpec: the only description of a model, read strictly from config.json or GGUF metadata.

The loader, the engine, the planner and the docs all use these numbers: parameters, bytes, KV bytes per
token, FLOPs per token. The readers are in `hf_config` and `gguf_config`; `families` is the family table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import TENSOR_TYPES

Activation = Literal["silu", "gelu_tanh"]
RopeScalingKind = Literal["linear", "llama3", "yarn", "dynamic"]

# Bytes per parameter, block scales included: a 4-bit block of 16 (NVFP4) or 32 (MXFP4) has one scale byte;
# the GGUF types have their own block layout.
BYTES_PER_PARAMETER: dict[str, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    **{f"gguf:{name}": nbytes / elements for name, elements, nbytes in TENSOR_TYPES.values()},
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    "dynamic" only acts on sequences longer than `original_context`, which is then the model's context.
    """

    kind: RopeScalingKind
    factor: float
    original_context: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = 0.1·ln(factor) + 1


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float
    dim: int  # rotated part of each head
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The part that can differ from layer to layer."""

    rope: RopeSpec
    window: int | None = None  # sliding window in tokens; None = full attention


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Routed experts in place of the dense FFN. Read for counting; not supported for serving."""

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    shared_expert_ffn_size: int = 0
    shared_expert_gate: bool = False  # a learned scalar per token scales the shared expert
    dense_layers: tuple[int, ...] = ()  # layers that keep the dense FFN


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_context: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False  # bias on the attention output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rope
    post_norms: bool = False  # Gemma: norms after attention and after the MLP, before the residual add
    norm_offset: float = 0.0  # Gemma in HF layout stores norms as w, applied as (1 + w); GGUF stores 1 + w
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden)
    attention_scale: float = 0.0  # multiplies q·k
    logit_softcap: float | None = None
    attention_softcap: float | None = None
    tied_embeddings: bool = True
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    moe: MoESpec | None = None
    weight_format: str = "float32"  # as stored: float32, float16, bfloat16, fp8, gguf:Q4_1, …
    stored_bytes: int | None = None  # size of the weights on disk, if the files were read
    notes: tuple[str, ...] = ()  # what the reader left out, for display

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_size",
            "vocab_size",
            "max_context",
        )
        for size in (*sizes, "num_layers"):
            if getattr(self, size) < 1:
                raise BrokenModel(f"{self.name}: {size} is {getattr(self, size)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise BrokenModel(
                f"{self.name}: {self.num_heads} heads is not a multiple of {self.num_kv_heads} KV heads"
            )
        for rope in {layer.rope for layer in self.layers}:
            if rope.dim % 2 or not 0 < rope.dim <= self.head_dim:
                raise BrokenModel(
                    f"{self.name}: rotary size {rope.dim} must be even and at most head_dim {self.head_dim}"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    # ---- parameters ----

    @property
    def parameters(self) -> int:
        """Every weight once: embeddings, layers, final norm, and the LM head unless it is tied.

        vocab·hidden · (1 if tied else 2) + hidden + Σ layers (attention + norms + FFN)
        """
        heads = 1 if self.tied_embeddings else 2
        layers = sum(self._layer_parameters(index, active=False) for index in range(self.num_layers))
        return heads * self.vocab_size * self.hidden_size + self.hidden_size + layers

    @property
    def active_parameters(self) -> int:
        """`parameters` with only the experts one token uses; the same for dense models."""
        heads = 1 if self.tied_embeddings else 2
        layers = sum(self._layer_parameters(index, active=True) for index in range(self.num_layers))
        return heads * self.vocab_size * self.hidden_size + self.hidden_size + layers

    @property
    def matmul_parameters(self) -> int:
        """Weights one token is multiplied with in the layers: no embeddings, norms, biases or LM head."""
        experts = sum(self._ffn_matrix(index, active=True) for index in range(self.num_layers))
        return self.num_layers * self._attention_matrix + experts

    def weight_bytes(self, precision: str | float) -> int:
        """parameters · bytes per parameter, for a precision's name (see BYTES_PER_PARAMETER) or a number."""
        per_parameter = BYTES_PER_PARAMETER.get(precision) if isinstance(precision, str) else precision
        if per_parameter is None:
            known = ", ".join(BYTES_PER_PARAMETER)
            raise ValueError(f"unknown precision {precision!r}; use one of {known}, or a number of bytes")
        return round(self.parameters * per_parameter)

    @property
    def _attention_matrix(self) -> int:
        """q and output: hidden · heads · head_dim each; k and v: hidden · kv_heads · head_dim each."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    def _ffn_matrix(self, index: int, *, active: bool) -> int:
        """Gate, up and down: 3 · hidden · ffn; with experts: the router, and all or the active experts."""
        moe = self.moe
        if moe is None or index in moe.dense_layers:
            return 3 * self.hidden_size * self.ffn_size
        experts = moe.experts_per_token if active else moe.num_experts
        width = experts * moe.expert_ffn_size + moe.shared_expert_ffn_size
        router = moe.num_experts + (1 if moe.shared_expert_gate else 0)
        return self.hidden_size * (3 * width + router)

    def _layer_parameters(self, index: int, *, active: bool) -> int:
        """Matrices, plus norms (2 or 4 · hidden, and 2 · head_dim with QK-norm) and biases."""
        total = self._attention_matrix + self._ffn_matrix(index, active=active)
        total += (4 if self.post_norms else 2) * self.hidden_size
        if self.qk_norm:
            total += 2 * self.head_dim
        if self.qkv_bias:
            total += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        if self.output_bias:
            total += self.hidden_size
        if self.mlp_bias:
            total += 2 * self.ffn_size + self.hidden_size
        return total

    # ---- KV cache ----

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """A key and a value of every KV head in every layer: 2 · layers · kv_heads · head_dim · bytes.

        Windowed layers count in full: blocks are kept for the whole sequence.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def kv_tokens_seen(self, context: int) -> int:
        """Cached tokens one decode step reads: Σ layers min(context, window); `context` counts its own."""
        return sum(min(context, layer.window or context) for layer in self.layers)

    def kv_bytes_read(self, context: int, dtype_bytes: int = 2) -> int:
        """Bytes of KV cache that decode step reads: tokens seen · 2 · kv_heads · head_dim · bytes."""
        return 2 * self.kv_tokens_seen(context) * self.num_kv_heads * self.head_dim * dtype_bytes

    # ---- FLOPs: a multiplication and an addition count as two ----

    @property
    def matmul_flops_per_token(self) -> int:
        """2 · matmul_parameters: every layer's projections and FFN, without attention and LM head."""
        return 2 * self.matmul_parameters

    @property
    def lm_head_flops(self) -> int:
        """2 · hidden · vocab, once per sampled token."""
        return 2 * self.hidden_size * self.vocab_size

    def attention_flops(self, tokens: int, context: int = 0) -> int:
        """q·k and p·v of `tokens` new tokens after `context` cached ones, causal, windows respected.

        Σ layers 4 · heads · head_dim · Σ i=1…tokens min(context + i, window)
        """
        pairs = sum(attended_pairs(tokens, context, layer.window) for layer in self.layers)
        return 4 * self.num_heads * self.head_dim * pairs

    def prefill_flops(self, tokens: int, context: int = 0) -> int:
        """Computing `tokens` prompt tokens after `context` cached ones, and sampling once at the end."""
        return (
            tokens * self.matmul_flops_per_token + self.attention_flops(tokens, context) + self.lm_head_flops
        )

    def decode_flops(self, context: int) -> int:
        """One decode step of one sequence of `context` tokens, the new one included."""
        return self.prefill_flops(1, context - 1)

    def prefill_flops_per_token(self, tokens: int) -> float:
        """Mean over a prompt of `tokens` tokens without cached ones."""
        return self.prefill_flops(tokens) / tokens


def longest_context(stated: int, layers: tuple[LayerSpec, ...]) -> int:
    """`stated`, or more if yarn extends it: such configs often keep the trained length."""
    stretched = (
        int(scaling.original_context * scaling.factor)
        for scaling in (layer.rope.scaling for layer in layers)
        if scaling is not None and scaling.kind == "yarn" and scaling.original_context is not None
    )
    return max(stated, *stretched, 0)


def attended_pairs(tokens: int, context: int, window: int | None) -> int:
    """Σ i=1…tokens min(context + i, window), in closed form."""
    growing = tokens if window is None else max(0, min(tokens, window - context))
    full = (tokens - growing) * (window or 0)
    return growing * context + growing * (growing + 1) // 2 + full
