"""What is served: families by backend, and file formats by backend, computed from the code that serves them.

`ridgeline models support` prints it and docs/supported-models.md is generated from it. A family's row comes
from two configs made up from its declaration: the plainest one, and one that sets every optional key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.files.gguf import TENSOR_TYPES
from ridgeline.models.spec.coverage import COMPUTED, KINDS, WEIGHT_FORMATS, Backend, kinds_of
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.families import FAMILIES, SERVED_FORMATS
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import BYTES_PER_PARAMETER
from ridgeline.models.spec.readers.hf_config import ACTIVATIONS, read_values
from ridgeline.models.weights.packed_formats import FORMAT_NAMES, choose_format, is_lossless

BACKENDS: tuple[Backend, ...] = ("native", "torch", "cuda")
# A config with every key that a family may require; a family reads those that it knows.
SAMPLE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 12,  # as many as show each kind of layer
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "max_window_layers": 6,
    "rms_norm_eps": 1e-5,
}
# Values of optional keys that change the computation, where a family reads them (`Family.reads`).
OPTIONAL: dict[str, Any] = {
    "attention_multiplier": 0.5,
    "attn_logit_softcapping": 50.0,
    "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "partial_rotary_factor": 0.5,
    "residual_multiplier": 0.25,
}


@dataclass(frozen=True, slots=True)
class FamilySupport:
    """refusals: why a backend serves no model of the family; limits: what keeps some of them off it."""

    family: Family
    refusals: dict[Backend, str]
    limits: dict[Backend, str]

    def cell(self, backend: Backend) -> str:
        if refusal := self.refusals.get(backend):
            return f"no: {refusal}"
        limit = self.limits.get(backend)
        return f"yes, without {limit}" if limit else "yes"


def family_support() -> list[FamilySupport]:
    return [_support(family) for family in FAMILIES.values()]


def sample_spec(family: Family, *, optional: bool) -> ModelSpec:
    """A small model of the family; optional: with every optional part that it may have."""
    sample = {family.keys.get(key, key): value for key, value in SAMPLE.items()}
    sample[family.activation_key] = next(
        name for name, activation in ACTIVATIONS.items() if activation == family.activation
    )
    if optional:
        sample |= {family.keys.get(key, key): OPTIONAL[key] for key in family.reads & OPTIONAL.keys()}
        flags = (family.qkv_bias, family.output_bias, family.ffn_bias, family.qk_norm_key)
        sample |= {flag: True for flag in flags if isinstance(flag, str) and flag}
    values = ConfigValues(sample, family.name, defaults=family.defaults, names=family.keys)
    return read_values(values, family, family.name, {})


def _support(family: Family) -> FamilySupport:
    always, most = (kinds_of(sample_spec(family, optional=optional)) for optional in (False, True))
    refusals, limits = {}, {}
    for backend in BACKENDS:
        if missing := always - COMPUTED[backend]:
            refusals[backend] = _words(missing)
        elif missing := most - COMPUTED[backend]:
            limits[backend] = _words(missing)
    return FamilySupport(family, refusals, limits)


def _words(tags: Iterable[str]) -> str:
    return "; ".join(words for tag, words in KINDS.items() if tag in set(tags))


# ---- file formats ----


@dataclass(frozen=True, slots=True)
class FormatSupport:
    """What each backend computes with, by default, where a file has this format; None: it is refused."""

    container: str  # safetensors or GGUF
    stored: str
    computed: dict[Backend, str | None]


def format_support() -> list[FormatSupport]:
    """A format that only some families use has its own row, and so has one that no family uses."""
    types = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    rows = [_read("safetensors", name, types[name]) for name in SERVED_FORMATS]
    own = {name: family.name for family in FAMILIES.values() for name in family.formats}
    rows += [_read("safetensors", f"{name} ({family})", name.upper()) for name, family in own.items()]
    rows += [_read("GGUF", name, name) for name, _, _ in TENSOR_TYPES.values()]
    known = {name for name in BYTES_PER_PARAMETER if not name.startswith("gguf:")}
    rows += [
        FormatSupport("safetensors", name, dict.fromkeys(BACKENDS))
        for name in sorted(known - set(types) - own.keys())
    ]
    return rows


def _read(container: str, stored: str, type_name: str) -> FormatSupport:
    packed = choose_format("auto", (type_name,), outermost=False, isa="avx512")
    native = FORMAT_NAMES[packed] + ("" if is_lossless(type_name, packed) else " (rounded)")
    if (narrow := choose_format("auto", (type_name,), outermost=False, isa="avx2")) != packed:
        native += f"; on AVX2 {FORMAT_NAMES[narrow]}"
    cuda = "float16" if stored == "float16" else "bfloat16"
    if type_name == "MXFP4" and container == "safetensors":
        cuda = "mxfp4, as stored"
    return FormatSupport(container, stored, {"native": native, "torch": "float32", "cuda": cuda})


# ---- as text ----


def as_json() -> dict[str, Any]:
    return {
        "families": [
            {
                "family": row.family.name,
                "model_types": list(row.family.model_types),
                "architectures": list(row.family.architectures),
                "gguf_architecture": row.family.gguf_architecture,
                "backends": {
                    backend: {
                        "served": backend not in row.refusals,
                        "reason": row.refusals.get(backend) or row.limits.get(backend),
                    }
                    for backend in BACKENDS
                },
            }
            for row in family_support()
        ],
        "formats": [
            {"container": row.container, "stored": row.stored, "computed": row.computed}
            for row in format_support()
        ],
        "weights": {backend: list(names) for backend, names in WEIGHT_FORMATS.items()},
    }


def family_rows() -> list[list[str]]:
    """The table with its head: a row for each family."""
    head = ["family", "architecture in config.json", "in GGUF", *BACKENDS]
    rows = [
        [
            row.family.name,
            row.family.architectures[0],
            row.family.gguf_architecture or "–",
            *(row.cell(backend) for backend in BACKENDS),
        ]
        for row in family_support()
    ]
    return [head, *rows]


def format_rows() -> list[list[str]]:
    """The table with its head: formats that all backends treat alike share a row."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for row in format_support():
        cells = tuple(row.computed[backend] or "refused" for backend in BACKENDS)
        grouped.setdefault((row.container, *cells), []).append(row.stored)
    rows = [[container, ", ".join(names), *cells] for (container, *cells), names in grouped.items()]
    return [["file", "weights stored as", *BACKENDS], *rows]


def weights_rows() -> list[list[str]]:
    head = ["backend", "values of --weights"]
    return [head, *([backend, ", ".join(["auto", *names])] for backend, names in WEIGHT_FORMATS.items())]
