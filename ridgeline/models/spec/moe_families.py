"""Families with routed experts: how their configs name the experts, and where their checkpoints store them.

Read through `declarations.family.Family.experts`. The attention of most is that of a dense family; the
difference is here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues, shown
from ridgeline.models.spec.ffn import Experts, Router
from ridgeline.models.spec.names import HF_NAMES, Fused

PLAIN_ROUTER = Router()


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The config.json keys of routed experts; the empty string: the family has no such key."""

    num: tuple[str, ...] = ("num_experts", "num_local_experts")  # the first one present
    size: str = "moe_intermediate_size"
    normalized: str = ""  # whether the chosen experts' weights are divided by their sum
    gguf_normalized: bool = True  # the same in GGUF files, which do not state it
    shared_size: str = ""
    shared_gate: bool = False
    every: str = ""  # every n-th layer has experts, the others a dense FFN
    dense_layers: str = ""  # layers that have a dense FFN
    expert_layers: str = ""  # layers that have experts; takes precedence over `every`
    dense_size: str = "intermediate_size"  # of the layers without experts
    margin: str = ""  # half of Router.margin
    clamp: str = ""
    bias: bool = False  # of every expert's matrices
    router: Router = PLAIN_ROUTER  # what the family implies; the keys above override it


MIXTRAL_EXPERTS = ExpertKeys(num=("num_local_experts",), size="intermediate_size")
QWEN_EXPERTS = ExpertKeys(
    normalized="norm_topk_prob", every="decoder_sparse_step", dense_layers="mlp_only_layers"
)
QWEN_SHARED_EXPERTS = ExpertKeys(
    normalized="norm_topk_prob",
    gguf_normalized=False,
    every="decoder_sparse_step",
    dense_layers="mlp_only_layers",
    shared_size="shared_expert_intermediate_size",
    shared_gate=True,
)
MIXTRAL_NAMES = HF_NAMES.changed(
    {
        "router": "block_sparse_moe.gate.weight",
        "expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
        "expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
        "expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
    }
)
_INPUT = Fused("block_sparse_moe.input_linear.weight", ("expert_gate", "expert_up"))
_SHARED_INPUT = Fused("shared_mlp.input_linear.weight", ("shared_gate", "shared_up"))
GRANITE_MOE_NAMES = HF_NAMES.changed(
    {
        "router": "block_sparse_moe.router.layer.weight",
        **dict.fromkeys(_INPUT.roles, _INPUT),
        "expert_down": "block_sparse_moe.output_linear.weight",
        **dict.fromkeys(_SHARED_INPUT.roles, _SHARED_INPUT),
        "shared_down": "shared_mlp.output_linear.weight",
    }
)


def check_sparsemixer(
    values: ConfigValues, experts: Experts, *, per_token: str, normalized: str = "", scale: str = ""
) -> None:
    """Sparsemixer chooses two experts and computes their weights. Names the keys that say otherwise."""
    if experts.router.scores != "sparsemixer":
        return
    for key, found, computed in (
        (per_token, experts.per_token, 2),
        (normalized, experts.router.normalized, False),
        (scale, experts.router.scale, 1.0),
    ):
        if found != computed:
            raise UnsupportedModel(
                f"{values.where}: {values.shown(key)} = {shown(found)} is not supported with routing by "
                f"sparsemixer, only {shown(computed)}"
            )
