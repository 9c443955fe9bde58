"""What is served: families by backend, and file formats by backend, computed from the code that serves them.

`ridgeline models support` prints it and docs/supported-models.md is generated from it. A family's row comes
from two configs made up from its declaration: the plainest one, and one that sets every optional key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.files.gguf import TENSOR_TYPES
from ridgeline.models.quantized.blocks import usual_type
from ridgeline.models.quantized.config import NOT_READ, read_scheme
from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.spec.coverage import COMPUTED, KINDS, WEIGHT_FORMATS, Backend, kinds_of
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.families import FAMILIES, SERVED_FORMATS
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.readers.hf_config import ACTIVATIONS, read_values
from ridgeline.models.weights.low_bits.plan import device_format
from ridgeline.models.weights.packed_formats import FORMAT_NAMES, choose_format, is_lossless

SAMPLE_COLUMNS = 4096
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


QUANTIZED = "safetensors, quantized"
# A sample of the settings of every producer whose weights are read.
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FP8, _FP4 = ({"num_bits": bits, "type": "float"} for bits in (8, 4))
# As its schemes FP8, FP8_DYNAMIC, FP8_BLOCK, W8A8 and NVFP4 ask for.
_TO_FP8, _TO_INT8, _TO_FP4 = (
    {"input_activations": {**kind, "dynamic": True}} for kind in (_FP8, _INT8, _FP4)
)
_COMPRESSED = [
    {"format": "float-quantized", "weights": {**_FP8, "strategy": "tensor"}, **_TO_FP8},
    {"format": "float-quantized", "weights": {**_FP8, "strategy": "channel"}, **_TO_FP8},
    {
        "format": "float-quantized",
        "weights": {**_FP8, "strategy": "block", "block_structure": [128, 128]},
        **_TO_FP8,
    },
    {"format": "int-quantized", "weights": _INT8, **_TO_INT8},
    {"format": "pack-quantized", "weights": {**_INT4, "symmetric": True}},
    {"format": "pack-quantized", "weights": {**_INT4, "symmetric": False}},
    {"format": "pack-quantized", "weights": {**_INT4, "actorder": "group"}},
    {
        "format": "nvfp4-pack-quantized",
        "weights": {**_FP4, "strategy": "tensor_group", "group_size": 16},
        **_TO_FP4,
    },
    {"format": "mxfp4-pack-quantized", "weights": {**_FP4, "strategy": "group", "group_size": 32}},
]
CT = "compressed-tensors"
PRODUCED: list[tuple[str, dict[str, Any]]] = [
    ("fp8", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ("fp8", {"quant_method": "fp8"}),
    ("modelopt", {"quant_algo": "FP8"}),
    ("modelopt", {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    ("modelopt", {"quant_algo": "NVFP4"}),
    *((CT, {"quant_method": CT, "config_groups": {"0": group}}) for group in _COMPRESSED),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}),
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128}),
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
]


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

    container: str  # safetensors, GGUF or QUANTIZED
    stored: str
    computed: dict[Backend, str | None]


def format_support() -> list[FormatSupport]:
    """A format that only some families use has its own row, and so has one that no family uses."""
    types = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    rows = [_read("safetensors", name, types[name]) for name in SERVED_FORMATS]
    own = {name: family.name for family in FAMILIES.values() for name in family.formats}
    rows += [_read("safetensors", f"{name} ({family})", name.upper()) for name, family in own.items()]
    for format, producers in quantized_formats().items():
        row = _read(QUANTIZED, f"{format} of {', '.join(producers)}", usual_type(format))
        if device_format(format, SAMPLE_COLUMNS) is not None:
            beside = "; of bitsandbytes bfloat16" if "bitsandbytes" in producers else ""
            row.computed["cuda"] = f"{device_element(format)}, as stored{beside}"
        if (format.element, format.scale) == ("e2m1", "e8m0"):
            row.computed["cuda"] = "bfloat16; experts mxfp4, as stored"
        rows.append(row)
    rows += [_read("GGUF", name, name) for name, _, _ in TENSOR_TYPES.values()]
    rows += [FormatSupport(QUANTIZED, name, dict.fromkeys(BACKENDS)) for name in NOT_READ]
    return rows


def quantized_formats() -> dict[QuantFormat, list[str]]:
    """The formats that are read, with the producers that write them."""
    found: dict[QuantFormat, list[str]] = {}
    for producer, format, _ in _produced():
        producers = found.setdefault(format, [])
        if producer not in producers:
            producers.append(producer)
    return found


def _produced() -> Iterator[tuple[str, QuantFormat, str]]:
    """Producer, format, and the inputs that its files ask for ("" for none), for each sample."""
    for producer, settings in PRODUCED:
        scheme = read_scheme(settings)
        assert scheme is not None
        for format in scheme.formats():
            values = replace(format, activations=None, scale=_scale_of(format))
            yield producer, replace(values, packing="plain", stored_zeros="whole"), scheme.activations()


def _scale_of(format: QuantFormat) -> str:
    """The type that tells formats apart: that of 16- and 32-bit scales is the file's choice."""
    return format.scale if format.element == "e2m1" else "float32"


def _read(container: str, stored: str, type_name: str) -> FormatSupport:
    packed = choose_format("auto", (type_name,), outermost=False, isa="avx512")
    native = FORMAT_NAMES[packed] + ("" if is_lossless(type_name, packed) else " (rounded)")
    if (wide := choose_format("auto", (type_name,), outermost=False, isa="amx")) != packed:
        native += f"; on AMX {FORMAT_NAMES[wide]}" + ("" if is_lossless(type_name, wide) else " (rounded)")
    cuda = "float16" if stored == "float16" else "bfloat16"
    if type_name == "MXFP4" and container == "safetensors":
        cuda = "mxfp4, as stored"
    return FormatSupport(container, stored, {"native": native, "torch": "float32", "cuda": cuda})


@dataclass(frozen=True, slots=True)
class InputSupport:
    """A format whose files may ask for rounded inputs, and what each backend gives it."""

    stored: str
    asked: str  # FP8, int8 or FP4
    computed: dict[Backend, str]


def input_support() -> list[InputSupport]:
    """With `--weights auto`."""
    asked: dict[QuantFormat, list[str]] = {}
    for _, format, inputs in _produced():
        if inputs and inputs not in asked.setdefault(format, []):
            asked[format].append(inputs)
    return [
        InputSupport(
            str(format),
            " or ".join(kinds),
            {
                "native": _native_inputs(usual_type(format)),
                "torch": "not quantized: float32",
                "cuda": _cuda_inputs(format),
            },
        )
        for format, kinds in asked.items()
        if kinds
    ]


def _cuda_inputs(format: QuantFormat) -> str:
    """As the file asks, where the weights are computed as stored; static steps are replaced by each
    token's."""
    if device_format(format, SAMPLE_COLUMNS) is None or format.element not in ("e4m3", "int8"):
        return "not quantized: bfloat16"
    wide = format.group[1]
    return f"{device_element(format)}, per token" + (f" and {wide} columns" if wide else "")


def device_element(format: QuantFormat) -> str:
    return {"e4m3": "FP8"}.get(format.element, format.element)


def _native_inputs(type_name: str) -> str:
    """The library has its own form of inputs for integer weights (docs/native-kernels.md)."""
    packed = choose_format("auto", (type_name,), outermost=False, isa="avx512")
    if FORMAT_NAMES[packed] in ("float32", "bfloat16"):
        return f"not quantized: {FORMAT_NAMES[packed]}"
    if FORMAT_NAMES[packed] == "FP8":
        return "not quantized: float32; bfloat16 for several rows where the CPU multiplies it"
    return "the library's own: 15 bits for one row, 8 bits in groups of 32 for more"


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
        "inputs": [
            {"stored": row.stored, "asked": row.asked, "computed": row.computed} for row in input_support()
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


def input_rows() -> list[list[str]]:
    """The table with its head: formats that are treated alike share a row."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for row in input_support():
        cells = (row.asked, *(row.computed[backend] for backend in BACKENDS))
        grouped.setdefault(cells, []).append(row.stored)
    head = ["weights stored as", "inputs that files may ask for", *(f"inputs on {name}" for name in BACKENDS)]
    return [head, *([", ".join(names), *cells] for cells, names in grouped.items())]


def weights_rows() -> list[list[str]]:
    head = ["backend", "values of --weights"]
    return [head, *([backend, ", ".join(["auto", *names])] for backend, names in WEIGHT_FORMATS.items())]
