"""RangedOps: wraps each call of the torch backend's operators in a named range of torch's profiler.

Replaces a decoder's ops while its steps are profiled. A `linear` is identified by its weight. Imports torch;
only `torch_capture` imports this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from ridgeline.models.decoders.reference import Decoder

PREFIX = "ridgeline::"
# Names of ranges in the table.
NAMES = {
    "embed": "embedding",
    "rms_norm": "norms",
    "layer_norm": "norms",
    "qkv": "qkv projection",
    "apply_rope": "rope",
    "write_kv": "KV write",
    "plan_attention": "attention plan",
    "paged_attention": "attention",
    "output": "output projection",
    "gated_mlp": "FFN",
    "mlp": "FFN",
    "route": "router",
    "experts": "experts",
    "lm_head": "LM head",
}
# The operators of `work` behind each; the others move no weights or KV.
WORK = {
    "qkv": ("qkv",),
    "write_kv": ("kv_write",),
    "paged_attention": ("attention",),
    "output": ("output",),
    "gated_mlp": ("gate_up", "down"),
    "mlp": ("gate_up", "down"),
    "experts": ("gate_up", "down"),
    "lm_head": ("lm_head",),
}


class RangedOps:
    """Every op of the wrapped backend, in a range."""

    def __init__(self, ops: Any, matrices: dict[int, str]) -> None:
        """matrices: by the id of a weight, which one it is."""
        self._ops = ops
        self._matrices = matrices

    def __getattr__(self, name: str) -> Any:
        return partial(self._in_range, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with record_function(PREFIX + self._matrices.get(id(weight), "route")):
            out: Tensor = self._ops.linear(x, weight, bias)
        return out

    def _in_range(self, name: str, *args: Any, **more: Any) -> Any:
        with record_function(PREFIX + name):
            return getattr(self._ops, name)(*args, **more)


@contextmanager
def ranged(decoder: Decoder) -> Iterator[None]:
    """The decoder's operators are in ranges within this context."""
    plain: Any = decoder.ops
    matrices = {id(decoder.weights.lm_head): "lm_head"}
    for layer in decoder.weights.layers:
        matrices |= {id(layer.qkv): "qkv", id(layer.o): "output"}
    ranged_ops: Any = RangedOps(plain, matrices)
    decoder.use(ranged_ops)
    try:
        yield
    finally:
        decoder.use(plain)
