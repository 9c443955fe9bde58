"""Chooses the packed format of a matrix, from the user's setting and the types of its stored tensors.

"auto" keeps the stored precision, in the smallest format that holds all of a matrix's tensors without loss.
K-quants with scales per 16 weights have no such format, except Q6_K on some instruction sets. They and other
types of up to 4 bits become 8-bit groups of 32, whose rounding error is a small part of the type's own. FP8
with scales for fewer than 128 weights, and beside 16-bit tensors, becomes bfloat16: the smallest weights of a
group would lose more than their own rounding in 8-bit integers.
Called by `packing`; does not read files or bytes.
"""

from __future__ import annotations

from collections.abc import Collection

from ridgeline.ops.cpu.interface import Format

POLICIES = ("auto", "float32", "bfloat16", "int8", "int8-channel", "int4")

FORMAT_NAMES = {
    Format.F32: "float32",
    Format.BF16: "bfloat16",
    Format.Q4_H: "int4 (Q4_0)",
    Format.Q4_HM: "int4 (Q4_1)",
    Format.Q4_K: "int4 (Q4_K)",
    Format.Q6_K: "int6 (Q6_K)",
    Format.Q8_H: "int8",
    Format.Q8_FM: "int8 with minima",
    Format.Q8_C: "int8 per channel",
    Format.F8: "FP8",
    Format.Q4_Z: "int4 with zero points",
}

_SMALLEST_FIRST = (
    *(Format.Q4_H, Format.Q4_Z, Format.Q4_HM, Format.Q4_K),
    *(Format.Q6_K, Format.F8, Format.Q8_H, Format.Q8_FM),
)
CODES = "codes"  # in LOSSLESS: packed as codes, scales and zero points, not from blocks
# The instruction sets that multiply six bits at least as fast as eight (ARM: by the number of
# instructions, not timed). The others round Q6_K to 8 bits.
SIX_BIT_ISAS = ("avx2", "avxvnni", "avx512vnni", "avx512", "neon", "dotprod", "i8mm")

# Without loss: stored type → format → the GGUF type whose blocks the library packs into it. If that is
# another type, `reblock` rewrites the blocks. MXFP4: but for steps below 2^-24.
LOSSLESS: dict[str, dict[Format, str]] = {
    "Q4_0": {Format.Q4_H: "Q4_0", Format.Q8_H: "Q8_0", Format.Q8_FM: "Q5_0"},
    "Q4_1": {Format.Q4_HM: "Q4_1", Format.Q8_FM: "Q5_1"},
    "Q4_K": {Format.Q4_K: "Q4_K", Format.Q8_FM: "Q5_K"},
    "Q5_0": {Format.Q8_H: "Q8_0", Format.Q8_FM: "Q5_0"},
    "Q5_1": {Format.Q8_FM: "Q5_1"},
    "Q5_K": {Format.Q8_FM: "Q5_K"},
    "Q6_K": {Format.Q6_K: "Q6_K"},
    "Q8_0": {Format.Q8_H: "Q8_0"},
    "MXFP4": {Format.Q8_H: "Q8_0"},
    "IQ4_NL": {Format.Q8_H: "Q8_0"},
    "TQ1_0": {Format.Q4_H: "Q4_0"},
    "TQ2_0": {Format.Q4_H: "Q4_0"},
    "Q1_0": {Format.Q4_H: "Q4_0"},
    "Q4_Z": {Format.Q4_Z: CODES},
    "FP8": {Format.F8: CODES},
}
_CODEBOOKS = ("IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_XS")
# With a rounding finer than the type's own, or (Q8_0 next to types with minima) as the best available.
_NEARLY: dict[str, tuple[Format, ...]] = {
    "Q6_K": (Format.Q8_H, Format.Q8_FM),
    "Q3_K": (Format.Q8_H, Format.Q8_FM),
    "Q2_K": (Format.Q8_FM,),
    "Q8_0": (Format.Q8_FM,),
    **dict.fromkeys((*_CODEBOOKS, "NVFP4", "NF4", "INT4"), (Format.Q8_H, Format.Q8_FM)),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q1_0"), (Format.Q8_H, Format.Q8_FM)),
}
_EXACT_FLOATS: dict[Format, tuple[str, ...]] = {
    Format.BF16: ("BF16", "MXFP4"),
    Format.F32: ("F32", "F16", "BF16", *LOSSLESS, *_NEARLY, "FP8_OTHER", "INT8"),
}


def choose_format(policy: str, stored: Collection[str], *, outermost: bool, isa: str) -> Format:
    """The format of a matrix made of tensors with the `stored` types.

    outermost: the embedding and the LM head, which keep 8 bits and group scales where layers have less.
    isa:       the instruction set that will compute it
    """
    if policy == "auto":
        return _kept(stored, isa)
    if policy == "float32":
        return Format.F32
    if policy == "bfloat16":
        return Format.BF16
    if policy == "int8" or outermost:
        return Format.Q8_H
    if policy == "int8-channel":
        return Format.Q8_C
    if policy == "int4":
        kept = _kept(stored, isa)  # four bits already: quantizing again could only lose precision
        return kept if kept in (Format.Q4_H, Format.Q4_K, Format.Q4_Z) else Format.Q4_HM
    raise ValueError(f"unknown weights setting {policy!r}; use one of {', '.join(POLICIES)}")


def is_lossless(stored: str, format: Format) -> bool:
    return format in LOSSLESS.get(stored, {}) or stored in _EXACT_FLOATS.get(format, ())


def _kept(stored: Collection[str], isa: str) -> Format:
    for format in _SMALLEST_FIRST:
        if format == Format.Q6_K and isa not in SIX_BIT_ISAS:
            continue
        if all(format in LOSSLESS.get(kind, {}) or format in _NEARLY.get(kind, ()) for kind in stored):
            return format
    return Format.BF16
