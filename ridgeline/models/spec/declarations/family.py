"""Family: what a family's name implies beyond the numbers in its configuration, as data.

The files beside this one declare them, `families` is the table. The readers of config.json and GGUF metadata
build a ModelSpec from a declaration; the weight loaders read its names. Holds no tensors and reads no files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ridgeline.models.spec.ffn import Activation
from ridgeline.models.spec.layer_spec import Norms
from ridgeline.models.spec.mixers import QkNorm
from ridgeline.models.spec.moe_families import ExpertKeys
from ridgeline.models.spec.names import GGUF_NAMES, HF_NAMES, Fused, NameMap

# Which layers a configured sliding window applies to:
#   never       the family has none; a config that sets one is rejected
#   every       all layers (Mistral)
#   listed      those of layer_types; all if the config has no such list (Ministral)
#   from_layer  layers from max_window_layers on, if use_sliding_window is set (Qwen)
#   pattern     all but every n-th layer (Gemma)
#   chunks      rotated layers, and it does not slide: attention restarts every attention_chunk_size (Llama 4)
WindowRule = Literal["never", "every", "listed", "from_layer", "pattern", "chunks"]
# A bias that a family always has, never has, or has where the config sets this key.
Bias = bool | str
PRE_NORMS = Norms()


def _none() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. Fields that it leaves out have Llama's values."""

    name: str
    model_types: tuple[str, ...]  # config.json: model_type; the first one is that of the text model
    architectures: tuple[str, ...]  # config.json: architectures
    gguf_architecture: str | None = None

    # ---- keys of config.json ----
    keys: Mapping[str, str] = field(default_factory=_none)  # Llama's key → this family's name for it
    # Values that published configs omit, as in the reference code.
    defaults: Mapping[str, Any] = field(default_factory=_none)
    # Keys of `hf_features` and of scales that the family computes; in other families they are refused.
    reads: frozenset[str] = frozenset()
    # Flags that may be stated, but only with this value.
    fixed: Mapping[str, bool] = field(default_factory=_none)
    context_key: str = ""  # states the context in place of max_position_embeddings, where present
    nested: bool = False  # a multimodal config has the language model in text_config

    # ---- attention ----
    qkv_bias: Bias = False
    output_bias: Bias = False
    qk_norm: QkNorm = ""
    qk_norm_key: str = ""  # the flag that turns qk_norm on
    sinks: bool = False
    window_rule: WindowRule = "never"
    window_pattern: int = 0  # pattern: every n-th layer is full

    # ---- positions ----
    interleaved: bool = False  # the rotated pairs are neighbours, in the Hugging Face layout
    gguf_interleaved: bool = False  # the same in GGUF files
    gguf_truncated: bool = True  # RopeScaling.truncate of GGUF files, which do not state it
    local_rope: bool = False  # windowed layers have a separate rope, never scaled
    no_rope_interval: int = 0  # every n-th layer is not rotated, unless no_rope_layers says which
    rope_in_windows_only: bool = False  # full layers are not rotated
    learned_positions: bool = False  # a table of positions in place of rotation
    scaled_queries: bool = False  # queries of layers without rotation, if attn_temperature_tuning is set

    # ---- norms ----
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0  # in the HF layout; GGUF files include it
    norms: Norms = PRE_NORMS
    parallel_key: str = ""  # the flag that puts attention and FFN side by side

    # ---- FFN ----
    gated: bool = True
    ffn_bias: Bias = False
    ffn_multiple: int = 0  # of hidden_size, where the config has no size
    activation_key: str = "hidden_act"
    activation: Activation = "silu"  # of GGUF files, which do not state it

    head_bias: Bias = False

    # ---- scales ----
    scaled_embeddings: bool = False  # embeddings are multiplied by sqrt(hidden)
    divides_logits: bool = False  # GGUF: logit_scale is a divisor
    # GGUF files do not state that in the model of this depth attention is scaled by hidden / heads.
    gguf_wide_depth: int = 0

    # ---- names of stored tensors ----
    hf_names: NameMap = HF_NAMES
    gguf_names: NameMap = GGUF_NAMES
    experts: ExpertKeys | None = None  # the family has routed experts
    # Formats of its published checkpoints that are read besides plain floats.
    formats: frozenset[str] = frozenset()


def gguf_names_of(family: Family, stored: Collection[str]) -> NameMap:
    """The names in a GGUF file with these tensors: some converters fuse q, k and v, or gate and up."""
    names = family.gguf_names
    first = names.layer_prefix.format(layer=0)
    if f"{first}attn_qkv.weight" in stored:
        names = names.changed(NameMap.fused(Fused("attn_qkv.weight", ("q", "k", "v"))))
    if family.gated and f"{first}ffn_gate.weight" not in stored:
        names = names.changed(NameMap.fused(Fused("ffn_up.weight", ("gate", "up"))))
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in stored):
        names = names.changed(NameMap.fused(Fused("ffn_gate_up_exps.weight", ("expert_gate", "expert_up"))))
    return names
