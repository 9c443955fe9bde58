"""Shapes: the costs of models, for planning; also for models that cannot be served here."""

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.shapes.attention import (
    Attention,
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LinearAttention,
    Mamba2,
    SparseIndex,
)
from ridgeline.models.shapes.ffn import DenseFfn, Experts, Ffn
from ridgeline.models.shapes.precision import Precision, as_precision, bytes_of, format_name
from ridgeline.models.shapes.read import read_shape
from ridgeline.models.shapes.shape import ExtraWeights, LayerShape, ModelShape

__all__ = [
    "Attention",
    "CompressedAttention",
    "DenseFfn",
    "Experts",
    "ExtraWeights",
    "Ffn",
    "FullAttention",
    "LatentAttention",
    "LayerShape",
    "LinearAttention",
    "Mamba2",
    "ModelShape",
    "Precision",
    "SparseIndex",
    "UnsupportedModel",
    "as_precision",
    "bytes_of",
    "format_name",
    "read_shape",
]
