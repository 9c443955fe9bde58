"""Precision: the bytes per weight of a model, by part of the model.

Used by ModelSpec and the planner. Quantized checkpoints seldom quantize everything: embeddings, LM
head, norms and routers usually stay at 16 bits, and some formats apply only to routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.models.files.gguf import TENSOR_TYPES

# Bytes per parameter, block scales included: a 4-bit block of 16 (NVFP4) or 32 (MXFP4) has one scale byte;
# the GGUF types have their own block layout.
BYTES_PER_PARAMETER: dict[str, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int8-channel": 1.0,  # the native library's, with one scale per output
    "int4": 0.5,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    **{f"gguf:{name}": nbytes / elements for name, elements, nbytes in TENSOR_TYPES.values()},
}

# Other programs' names of the same formats.
ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp8_block": "fp8",
    "fp8_static": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int8_wo": "int8",
    "w8a8": "int8",
    "int4_wo": "int4",
    "int4_awq": "int4",
    "w4afp8": "int4",
    "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4",
    "w4a16_nvfp4": "nvfp4",
    "fp4": "nvfp4",
}
# Formats of the whole file, embeddings and LM head included.
WHOLE = ("float32", "bfloat16", "float16")
# Formats that published checkpoints use only for routed experts.
EXPERTS_ONLY = ("mxfp4",)


@dataclass(frozen=True, slots=True)
class Precision:
    """A format for each part; names as in BYTES_PER_PARAMETER."""

    linear: str  # projections of attention, dense FFN, shared experts
    experts: str  # routed experts
    rest: str = "bfloat16"  # embeddings, LM head, norms, routers, vision tower
    attention: str = ""  # its projections, if they differ from `linear`

    def __post_init__(self) -> None:
        for field in ("linear", "experts", "rest", "attention"):
            name = getattr(self, field) or self.linear
            object.__setattr__(self, field, format_name(name))

    @classmethod
    def named(cls, name: str) -> Precision:
        """The meaning of a bare format name: "fp8" leaves embeddings and LM head at 16 bits."""
        known = format_name(name)
        if known in WHOLE or known.startswith("gguf:"):
            return cls(known, known, known)
        return cls("bfloat16" if known in EXPERTS_ONLY else known, known)

    def __str__(self) -> str:
        others = {"attention": self.attention, "experts": self.experts}
        apart = [f"{part} {name}" for part, name in others.items() if name != self.linear]
        return ", ".join([self.linear, *apart])


def format_name(name: str) -> str:
    """Our name of a format, from any known spelling; ValueError if there is none."""
    known = ALIASES.get(name.lower(), name if name.startswith("gguf:") else name.lower())
    if known not in BYTES_PER_PARAMETER:
        names = ", ".join(key for key in BYTES_PER_PARAMETER if not key.startswith("gguf:"))
        raise ValueError(f"unknown precision {name!r}; use one of {names}, gguf:<type>")
    return known


def bytes_of(name: str) -> float:
    """Bytes per number in that format, block scales included."""
    return BYTES_PER_PARAMETER[format_name(name)]


def packed_precision(stored: Precision) -> Precision:
    """What the native library keeps of a checkpoint: it has no 4-bit floats (`packed_formats`)."""
    packed = {"nvfp4": "int8", "mxfp4": "int8"}
    kept = {field: packed.get(name, name) for field, name in _parts(stored).items()}
    return Precision(**kept)


def _parts(precision: Precision) -> dict[str, str]:
    return {field: getattr(precision, field) for field in ("linear", "experts", "rest", "attention")}


def as_precision(precision: Precision | str) -> Precision:
    return precision if isinstance(precision, Precision) else Precision.named(precision)
