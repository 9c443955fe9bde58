"""Which matrices stay in 16 bits whatever the format of the others: the names of a policy, and what they
mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec

# The matrices of a layer in 8 or 4 bits, by part.
PARTS = {
    "attention": ("qkv", "o"),
    "ffn": ("gate_up", "up", "down"),
    "experts": ("experts_gate_up", "experts_down"),
}
PART_OF = {name: part for part, names in PARTS.items() for name in names}
ALWAYS_KEPT = ("lm_head", "embed", "norms", "router")


class KeepPolicy:
    """Names of what stays in 16 bits: lm_head; layers.3; layers.3.attention; ffn; layers.0.ffn.down; …"""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = [tuple(name.split(".")) for name in names if name not in ALWAYS_KEPT]

    def keeps(self, layer: int, name: str) -> bool:
        path = ("layers", str(layer), PART_OF[name], name)
        return any(
            words in (path[: len(words)], path[2 : 2 + len(words)], path[3 : 3 + len(words)])
            for words in self._names
        )

    def kept_experts(self, spec: ModelSpec) -> Literal["all", "some", "none"]:
        """Which of the model's experts it keeps."""
        kept = {
            self.keeps(number, name)
            for number, layer in enumerate(spec.layers)
            if isinstance(layer.ffn, Experts)
            for name in PARTS["experts"]
        }
        return "some" if len(kept) == 2 else "all" if True in kept else "none"


def wrong_keep(name: str, num_layers: int | None = None) -> str | None:
    """Why a name of the policy means nothing; None if it is right."""
    if name in ALWAYS_KEPT:
        return None
    words = name.split(".")
    if words[0] == "layers":
        if len(words) < 2 or not words[1].isdigit():
            return f"{name!r} has no layer number: write layers.0"
        if num_layers is not None and int(words[1]) >= num_layers:
            return f"{name!r}: the model has layers 0 to {num_layers - 1}"
        words = words[2:]
    if not words:
        return None
    known = [[part] for part in PARTS] + [[each] for each in PART_OF]
    known += [[part, each] for each, part in PART_OF.items()]
    if words in known:
        return None
    return f"{name!r} is not known: use lm_head, layers.N, or one of {', '.join([*PARTS, *PART_OF])}"


def wrong_experts_keep(names: Iterable[str], spec: ModelSpec) -> str | None:
    """Why names of the policy do not fit experts stored in MXFP4; None if they do."""
    some = [name for name in names if KeepPolicy([name]).kept_experts(spec) == "some"]
    if not some:
        return None
    return (
        f"{', '.join(some)}: experts stored as MXFP4 are expanded to 16 bits in every layer or in none. Use "
        "--quantization-keep experts, or leave their layers out"
    )
