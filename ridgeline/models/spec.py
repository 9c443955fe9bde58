"""ModelSpec: the one description of a model, read strictly off config.json or GGUF metadata.

The loader, the engine, the planner and the docs all use these numbers: parameters, bytes, KV bytes per
token, FLOPs per token. Readers are in `hf_config` and `gguf_config`; `families` is the table of families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
RopeScalingKind = Literal["linear", "llama3", "yarn", "dynamic"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context."""

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
    """What can differ from layer to layer."""

    rope: RopeSpec
    window: int | None = None  # sliding window in tokens; None = full attention


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Routed experts in place of the dense FFN. Read for counting; serving says so if it cannot."""

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    shared_expert_ffn_size: int = 0
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
    norm_offset: float = 0.0  # Gemma: checkpoint norms are stored as w, applied as (1 + w)
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

    @property
    def num_layers(self) -> int:
        return len(self.layers)
