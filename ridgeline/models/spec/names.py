"""NameMap: the names under which a checkpoint stores the weights of each role, as data.

A role is a weight as the decoder knows it (`weights.layout`): q, k, v, gate, expert_up, … A stored tensor may
have the rows of several roles (`Fused`), of all experts (its name has no `{expert}`), or be transposed. A
family declares where it differs from HF_NAMES and GGUF_NAMES. Reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class Fused:
    """A stored tensor with the rows of several roles.

    rows:      those of the first role, then those of the second, …
    grouped:   for each KV head: the rows of its query heads, of its key, of its value
    alternate: one row of each role in turn
    """

    name: str
    roles: tuple[str, ...]
    layout: Literal["rows", "grouped", "alternate"] = "rows"


@dataclass(frozen=True, slots=True)
class NameMap:
    """Names of layer tensors follow `layer_prefix`, all but `heads` follow one of `prefixes`."""

    top: Mapping[str, str]
    layer: Mapping[str, str | Fused]
    prefixes: tuple[str, ...] = ("",)
    layer_prefix: str = "layers.{layer}."
    heads: tuple[str, ...] = ()  # names of the LM head, without a prefix
    transposed: frozenset[str] = frozenset()  # of `layer`: stored as [in, out]
    harmless: str = "(?!)"  # a pattern of tensors that are not read

    def changed(
        self,
        layer: Mapping[str, str | Fused | None] | None = None,
        top: Mapping[str, str] | None = None,
        **others: object,
    ) -> NameMap:
        """A copy with these names replaced or added; None removes one."""
        names = {role: name for role, name in {**self.layer, **(layer or {})}.items() if name is not None}
        return replace(
            self,
            layer=MappingProxyType(names),
            top=MappingProxyType({**self.top, **(top or {})}),
            **others,  # type: ignore[arg-type]
        )

    @staticmethod
    def fused(parts: Fused) -> dict[str, Fused]:
        """The entries of one stored tensor, for `changed`: of its matrix, and of its bias if it has one."""
        bias = parts.name.removesuffix(".weight") + ".bias"
        biases = replace(parts, name=bias, roles=tuple(f"{role}_bias" for role in parts.roles))
        return dict.fromkeys(parts.roles, parts) | dict.fromkeys(biases.roles, biases)


def with_biases(names: Mapping[str, str], roles: tuple[str, ...]) -> dict[str, str]:
    """The names, and for these roles those of their biases: .weight becomes .bias."""
    return {**names, **{f"{role}_bias": names[role].removesuffix(".weight") + ".bias" for role in roles}}


_HF_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "sinks": "self_attn.sinks",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "mlp.experts.{expert}.up_proj.weight",
    "expert_down": "mlp.experts.{expert}.down_proj.weight",
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_scale": "mlp.shared_expert_gate.weight",
}
# Llama's, and the start of every other. A text decoder inside a multimodal checkpoint has a longer prefix.
HF_NAMES = NameMap(
    top=MappingProxyType(
        with_biases({"embed": "embed_tokens.weight", "final_norm": "norm.weight"}, ("final_norm",))
    ),
    layer=MappingProxyType(
        with_biases(
            _HF_LAYER,
            (
                *("attn_norm", "ffn_norm", "q", "k", "v", "o", "gate", "up", "down", "router"),
                *("expert_gate", "expert_up", "expert_down"),
            ),
        )
    ),
    prefixes=("model.", "language_model.model.", "model.language_model."),
    heads=("lm_head.weight", "language_model.lm_head.weight"),
    # Rotary frequencies follow from the configuration; the vision part is not used.
    harmless=r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\.",
)
# With four norms per layer, post_attention_layernorm has its literal meaning.
HF_FOUR_NORMS = HF_NAMES.changed(
    {
        "post_attn_norm": "post_attention_layernorm.weight",
        "ffn_norm": "pre_feedforward_layernorm.weight",
        "post_ffn_norm": "post_feedforward_layernorm.weight",
    }
)

_GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "sinks": "attn_sinks.weight",
    "o": "attn_output.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "post_ffn_norm": "post_ffw_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "router": "ffn_gate_inp.weight",
    "expert_gate": "ffn_gate_exps.weight",
    "expert_up": "ffn_up_exps.weight",
    "expert_down": "ffn_down_exps.weight",
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "shared_scale": "ffn_gate_inp_shexp.weight",
}
GGUF_NAMES = NameMap(
    top=MappingProxyType(
        with_biases(
            {
                "embed": "token_embd.weight",
                "final_norm": "output_norm.weight",
                "positions": "position_embd.weight",
            },
            ("final_norm",),
        )
    ),
    layer=MappingProxyType(with_biases(_GGUF_LAYER, tuple(_GGUF_LAYER))),
    layer_prefix="blk.{layer}.",
    heads=("output.weight",),
    harmless=r"^rope_(freqs|factors_long|factors_short)\.weight$|^blk\.\d+\.attn_rot_embd\b",
)
