"""Which matrices are quantized: those of attention and feed-forward parts, without those that --keep names.

Embeddings, norms, biases, routers and the head always stay in their 16 bits: they are few bytes, and their
loss is large.
"""

from __future__ import annotations

from ridgeline.lab.errors import BadInput
from ridgeline.lab.quantize.checkpoint import Checkpoint
from ridgeline.models.quantized.config import Rule
from ridgeline.models.quantized.format import QuantFormat
from ridgeline.options import nearest

_GROUPS_TRIED = (128, 96, 64, 48, 32, 16)


class KeepPolicy:
    def __init__(self, checkpoint: Checkpoint, keep: tuple[str, ...], format: QuantFormat) -> None:
        """BadInput if a pattern names nothing, or if rows are not whole groups."""
        self._rule = Rule(keep, None)
        names = [name for layer in (None, *range(checkpoint.layers)) for name in checkpoint.names(layer)]
        modules = [checkpoint.module(name) for name in names]
        known = {*modules, checkpoint.module(checkpoint.head), "lm_head"}
        for pattern in keep:
            if not any(Rule((pattern,), None).applies_to(one) for one in known):
                parts = dict.fromkeys(
                    part for module in modules for part in module.split(".") if part.isidentifier()
                )
                raise BadInput(f"--keep {pattern}: the model has no such module{nearest(pattern, parts)}")
        matrices = [name for name in names if checkpoint.is_matrix(name)]
        self._quantized = frozenset(
            name for name in matrices if not self._rule.applies_to(checkpoint.module(name))
        )
        if not self._quantized:
            raise BadInput(f"--keep {' --keep '.join(keep)}: leaves no matrix to quantize")
        self.kept_modules = sorted(
            checkpoint.module(name) for name in matrices if name not in self._quantized
        )
        self.kept_modules += sorted(
            checkpoint.module(one.name)
            for layer in range(checkpoint.layers)
            for one in checkpoint.find(layer, "router", "shared_scale")
        )
        self._refuse_broken_groups(checkpoint, format)

    def is_quantized(self, name: str) -> bool:
        return name in self._quantized

    @property
    def quantized(self) -> frozenset[str]:
        return self._quantized

    def _refuse_broken_groups(self, checkpoint: Checkpoint, format: QuantFormat) -> None:
        if format.granularity != "group":
            return
        widths = {name: checkpoint.pieces(name)[0].piece.shape[-1] for name in self._quantized}
        size = format.group[1]
        if broken := sorted(name for name, width in widths.items() if width % size):
            fitting = [one for one in _GROUPS_TRIED if not any(width % one for width in widths.values())]
            way_out = f"use --group {fitting[0]}" if format.is_integer and fitting else "use another --to"
            raise BadInput(
                f"{broken[0]}: its rows of {widths[broken[0]]} weights are not whole groups of {size}; "
                f"{way_out}, or --keep these matrices"
            )
