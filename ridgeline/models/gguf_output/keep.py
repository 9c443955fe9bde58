"""Which tensors of a GGUF file --keep leaves in the source's own float type.

A pattern is a part of a module's name, in the checkpoint's words (layers.0, down_proj, lm_head) or in GGUF's
(blk.0, ffn_down). A tensor that GGUF fuses or stacks is kept if one of its parts is named.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.gguf_output.recipes import FLOAT_TYPES
from ridgeline.models.gguf_output.tensors import OutputTensor
from ridgeline.models.quantized.config import Rule
from ridgeline.options import nearest

HEAD, EMBEDDING = ("lm_head", "output"), "token_embd.weight"
SEVERAL = "F32"  # holds every value, where a tensor is made of several types


def kept_types(tensors: Sequence[OutputTensor], keep: Sequence[str], tied: bool) -> dict[str, str]:
    """Their types by name. tied: the embedding is the head too. UnsupportedModel: a pattern fits nothing."""
    found: dict[str, str] = {}
    for pattern in keep:
        rule = Rule((pattern,), None)
        named = [tensor for tensor in tensors if any(map(rule.applies_to, _modules(tensor, tied)))]
        if not named:
            parts = {part for tensor in tensors for module in tensor.modules for part in module.split(".")}
            words = sorted(part for part in parts if part.isidentifier())
            raise UnsupportedModel(f"--keep {pattern}: the model has no such module{nearest(pattern, words)}")
        found |= {tensor.name: _own_type(tensor) for tensor in named}
    return found


def _modules(tensor: OutputTensor, tied: bool) -> frozenset[str]:
    return tensor.modules.union(HEAD) if tied and tensor.name == EMBEDDING else tensor.modules


def _own_type(tensor: OutputTensor) -> str:
    """Of a tensor that is quantized already: 16 bits that hold the values of every format's scales."""
    if len(tensor.stored) > 1:
        return SEVERAL
    (stored,) = tensor.stored
    return stored if stored in FLOAT_TYPES else "BF16"
