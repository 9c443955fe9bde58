"""Families with routed experts: how their configs name the experts, and where their checkpoints store them.

Part of the table in `families`. The attention of most is that of a dense family; the difference is here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.models.spec.ffn import Router
from ridgeline.models.spec.names import HF_NAMES, Fused, NameMap

SOFTMAX = Router()


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The config.json keys of routed experts; the empty string: the family has no such key."""

    num: tuple[str, ...] = ("num_experts", "num_local_experts")  # the first one present
    size: str = "moe_intermediate_size"
    router: Router = SOFTMAX
    normalized: str = ""  # whether the chosen experts' weights are divided by their sum
    shared_size: str = ""
    shared_gate: bool = False
    bias: bool = False
    clamp: str = ""
    jitter: str = ""  # sparsemixer: the margin within which experts compete
    every: str = ""  # every n-th layer has experts, the others a dense FFN
    dense_layers: str = ""  # layers that have a dense FFN
    dense_size: str = "intermediate_size"


MIXTRAL_EXPERTS = ExpertKeys(num=("num_local_experts",), size="intermediate_size")
QWEN_EXPERTS = ExpertKeys(
    normalized="norm_topk_prob", every="decoder_sparse_step", dense_layers="mlp_only_layers"
)
QWEN_SHARED_EXPERTS = ExpertKeys(
    normalized="norm_topk_prob",
    every="decoder_sparse_step",
    dense_layers="mlp_only_layers",
    shared_size="shared_expert_intermediate_size",
    shared_gate=True,
)
OLMOE_EXPERTS = ExpertKeys(size="intermediate_size", normalized="norm_topk_prob")
PHI_EXPERTS = ExpertKeys(
    num=("num_local_experts",),
    size="intermediate_size",
    router=Router(scores="sparsemixer", normalized=False),
    jitter="router_jitter_noise",
)
LLAMA4_EXPERTS = ExpertKeys(
    num=("num_local_experts",),
    size="intermediate_size",
    router=Router(scores="sigmoid", normalized=False, scales_input=True),
    shared_size="intermediate_size",
    every="interleave_moe_layer_step",
    dense_size="intermediate_size_mlp",
)
GPT_OSS_EXPERTS = ExpertKeys(
    num=("num_local_experts",),
    size="intermediate_size",
    router=Router(bias=True),
    bias=True,
    clamp="swiglu_limit",
)

MIXTRAL_NAMES = HF_NAMES.changed(
    {
        "router": "block_sparse_moe.gate.weight",
        "expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
        "expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
        "expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
    }
)
GRANITE_MOE_NAMES = HF_NAMES.changed(
    {
        "router": "block_sparse_moe.router.layer.weight",
        **NameMap.fused(Fused("block_sparse_moe.input_linear.weight", ("expert_gate", "expert_up"))),
        "expert_down": "block_sparse_moe.output_linear.weight",
    }
)
_GPT_OSS_BOTH = "mlp.experts.gate_up_proj"
GPT_OSS_NAMES = HF_NAMES.changed(
    {
        "router": "mlp.router.weight",
        "router_bias": "mlp.router.bias",
        **dict.fromkeys(
            ("expert_gate", "expert_up"), Fused(_GPT_OSS_BOTH, ("expert_gate", "expert_up"), "alternate")
        ),
        **dict.fromkeys(
            ("expert_gate_bias", "expert_up_bias"),
            Fused(f"{_GPT_OSS_BOTH}_bias", ("expert_gate_bias", "expert_up_bias"), "alternate"),
        ),
        "expert_down": "mlp.experts.down_proj",
        "expert_down_bias": "mlp.experts.down_proj_bias",
    },
    transposed=frozenset({_GPT_OSS_BOTH, "mlp.experts.down_proj"}),
)
_LLAMA4_BOTH = "feed_forward.experts.gate_up_proj"
LLAMA4_NAMES = HF_NAMES.changed(
    {
        "gate": "feed_forward.gate_proj.weight",
        "up": "feed_forward.up_proj.weight",
        "down": "feed_forward.down_proj.weight",
        "router": "feed_forward.router.weight",
        **dict.fromkeys(("expert_gate", "expert_up"), Fused(_LLAMA4_BOTH, ("expert_gate", "expert_up"))),
        "expert_down": "feed_forward.experts.down_proj",
        "shared_gate": "feed_forward.shared_expert.gate_proj.weight",
        "shared_up": "feed_forward.shared_expert.up_proj.weight",
        "shared_down": "feed_forward.shared_expert.down_proj.weight",
    },
    transposed=frozenset({_LLAMA4_BOTH, "feed_forward.experts.down_proj"}),
)
