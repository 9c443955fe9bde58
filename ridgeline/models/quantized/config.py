"""Quantization settings of config.json and hf_quant_config.json: a format for each matrix, by module name.

`read_scheme` understands what producers write. A setting that it does not know is a refusal with its reason,
kept in the scheme: a model that cannot be served can still be described. Reads no weights and no files.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ridgeline.models.quantized.format import MXFP4, NVFP4, InputFormat, QuantFormat, fp8_format

BLOCK = (128, 128)
# Keys that list modules which are not quantized.
IGNORED_KEYS = (
    *("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "llm_int8_skip_modules"),
)
NOT_READ = {
    "aqlm": "AQLM's codebooks",
    "auto-round": "AutoRound's own format",
    "intel/auto-round": "AutoRound's own format",
    "bitnet": "BitNet's ternary weights",
    "eetq": "EETQ's format",
    "exl2": "ExLlamaV2's format",
    "exl3": "ExLlamaV3's format",
    "fp_quant": "FP-Quant's rotated weights",
    "higgs": "HIGGS' grids",
    "hqq": "HQQ's format",
    "quanto": "quanto's format",
    "quark": "Quark's format",
    "quip": "QuIP#'s codebooks",
    "spqr": "SpQR's format",
    "torchao": "torchao's format",
    "vptq": "VPTQ's codebooks",
}


class Unreadable(ValueError):
    """Settings that name something which is not read; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Matrices whose module matches one of the patterns have this format; None: they are not quantized."""

    patterns: tuple[str, ...]
    format: QuantFormat | None

    def applies_to(self, module: str) -> bool:
        return any(_matches(pattern, module) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """method: the producer's name of it; rules: the first that applies counts; default: without any;
    refusal: why its weights are not read, empty if they are."""

    method: str
    rules: tuple[Rule, ...] = ()
    default: QuantFormat | None = None
    refusal: str = ""

    def format_of(self, module: str) -> QuantFormat | None:
        """The format of a module's matrix; None if it is not quantized."""
        return next((rule.format for rule in self.rules if rule.applies_to(module)), self.default)

    def formats(self) -> tuple[QuantFormat, ...]:
        """Every format once, in the order of the rules."""
        every = (*(rule.format for rule in self.rules), self.default)
        return tuple(dict.fromkeys(format for format in every if format is not None))

    def activations(self) -> str:
        """The types that inputs were meant to be rounded to, in words; empty if none."""
        kinds = (format.activations.name for format in self.formats() if format.activations)
        return " and ".join(dict.fromkeys(kinds))

    @property
    def has_static_inputs(self) -> bool:
        """Whether the file has scales of inputs."""
        return any(format.activations is not None and format.activations.static for format in self.formats())


def read_scheme(
    config: Mapping[str, Any] | None, beside: Mapping[str, Any] | None = None
) -> QuantScheme | None:
    """config: `quantization_config` of config.json; beside: `quantization` of hf_quant_config.json.

    None if the weights are not quantized, or by MXFP4 in the layout of one family (`weights.mxfp4`).
    """
    settings = {**(beside or {}), **(config or {})}
    algorithm = str(settings.get("quant_algo") or "").upper()
    method = str(settings.get("quant_method") or "").lower()
    if not method and not algorithm:
        return None
    if method == "mxfp4":
        return None
    name = "modelopt" if algorithm and method in ("", "modelopt", "fp8") else method
    try:
        reader = _READERS.get(name)
        if reader is None:
            known = NOT_READ.get(name)
            raise Unreadable(
                f"{known} ({name}) is not read" if known else f"quant_method {name!r} is not known"
            )
        rules, default = reader(settings)
    except Unreadable as error:
        return QuantScheme(name, refusal=str(error))
    ignored = tuple(text for key in IGNORED_KEYS for text in _texts(settings.get(key)))
    first = (Rule(ignored, None),) if ignored else ()
    return QuantScheme(name, (*first, *rules), default)


def read_kv_format(config: Mapping[str, Any] | None, beside: Mapping[str, Any] | None = None) -> str:
    """The type that a file asks the KV cache to have, in words; empty if none. Arguments as `read_scheme`."""
    settings = {**(beside or {}), **(config or {})}
    asked = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    if isinstance(asked, Mapping):
        kind, bits = str(asked.get("type", "int")), asked.get("num_bits", 8)
        return "FP8" if (kind, bits) == ("float", 8) else f"{kind}{bits}"
    name = str(asked or "").upper()
    # "static": AutoFP8's settings, whose only type is FP8.
    return {"STATIC": "FP8", "NONE": "", "INT8": "int8"}.get(name, name)


Read = tuple[tuple[Rule, ...], QuantFormat | None]


def _fp8(settings: Mapping[str, Any]) -> Read:
    if str(settings.get("store_dtype") or "") == "mxfp4":
        raise Unreadable("FP8 with experts stored as MXFP4 (store_dtype) is not read")
    static = settings.get("activation_scheme") == "static"
    block = settings.get("weight_block_size")
    format = fp8_format("block" if block else "tensor", static=static)
    if block:
        if not (
            isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        ):
            raise Unreadable(f"weight_block_size {block!r} is not two numbers")
        inputs = InputFormat("e4m3", 0 if static else block[1], static=static)
        format = replace(format, group=(block[0], block[1]), activations=inputs)
    return (), format


def _fbgemm(settings: Mapping[str, Any]) -> Read:
    return (), fp8_format("channel")


def _gptq(settings: Mapping[str, Any]) -> Read:
    bits, size = settings.get("bits"), settings.get("group_size", 128)
    version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if bits not in (2, 4, 8):
        raise Unreadable(f"GPTQ with {bits} bits is not read; 2, 4 and 8 are")
    if version not in ("gptq", "gptq_v2"):
        raise Unreadable(f"GPTQ weights packed as {version!r} are not read; gptq and gptq_v2 are")
    if settings.get("meta", {}) and str((settings["meta"] or {}).get("quantizer", "")).startswith("qqq"):
        raise Unreadable("QQQ's weights are not read")
    format = QuantFormat(
        f"int{bits}",
        *(("group", (1, size)) if isinstance(size, int) and size > 0 else ("channel", (1, 0))),
        "float16",
        zero_point=not settings.get("sym", True),
        act_order=bool(settings.get("desc_act")),
        stored_zeros="whole" if version == "gptq_v2" else "less one",
        packing="gptq",
    )
    rules = []
    for pattern, changes in dict(settings.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            rules.append(Rule((f"re:{pattern[2:]}",), None))
        elif dict(changes or {}).keys() & {"bits", "group_size", "desc_act", "sym"}:
            inner, _ = _gptq({**settings, **changes, "dynamic": None}), None
            rules.append(Rule((f"re:{pattern.removeprefix('+:')}",), inner[1]))
    return tuple(rules), format


def _awq(settings: Mapping[str, Any]) -> Read:
    bits, size = settings.get("bits", 4), settings.get("group_size", 128)
    version = str(settings.get("version") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise Unreadable(f"AWQ with {bits} bits packed as {version!r} is not read; 4 bits packed as gemm are")
    if not isinstance(size, int) or size <= 0:
        raise Unreadable(f"AWQ with group_size {size!r} is not read")
    return (), QuantFormat(
        "int4", "group", (1, size), "float16", bool(settings.get("zero_point", True)), packing="awq"
    )


def _bitsandbytes(settings: Mapping[str, Any]) -> Read:
    if settings.get("load_in_8bit"):
        return (), QuantFormat("int8", "channel", (1, 0), packing="bnb8", activations=InputFormat("int8"))
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if not settings.get("load_in_4bit") or kind not in ("nf4", "fp4"):
        raise Unreadable(
            f"bitsandbytes with bnb_4bit_quant_type {kind!r} is not read; nf4, fp4 and 8 bits are"
        )
    return (), QuantFormat(kind, "group", (1, 64), packing="bnb4")


def _compressed(settings: Mapping[str, Any]) -> Read:
    if dict(settings.get("transform_config") or {}).get("config_groups"):
        raise Unreadable("weights rotated by transform_config are not read")
    sparsity = str(dict(settings.get("sparsity_config") or {}).get("format") or "dense")
    if sparsity not in ("dense", "None"):
        raise Unreadable(f"sparse weights ({sparsity}) are not read")
    rules, default = [], None
    for group in dict(settings.get("config_groups") or {}).values():
        if not group.get("weights"):
            continue
        packing = str(group.get("format") or settings.get("format") or "")
        format = _compressed_format(group["weights"], group.get("input_activations"), packing)
        targets = tuple(_texts(group.get("targets"))) or ("Linear",)
        if "Linear" in targets:
            default = format
        rules.append(Rule(tuple(target for target in targets if target != "Linear"), format))
    if default is None and not rules:
        raise Unreadable("compressed-tensors without a group of weights is not read")
    return tuple(rule for rule in rules if rule.patterns), default


def _compressed_format(
    weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, packing: str
) -> QuantFormat:
    bits, kind = weights.get("num_bits"), str(weights.get("type", "int"))
    size, symmetric = weights.get("group_size"), bool(weights.get("symmetric", True))
    strategy = weights.get("strategy") or ("group" if size and size > 0 else "tensor")
    is_mx = packing.startswith("mx") or (kind == "float" and bits == 4 and size == 32)
    activations = _input_format(inputs, is_mx=is_mx)
    if kind == "float" and bits == 4:
        format = MXFP4 if size == 32 else NVFP4
        return replace(format, activations=activations)
    if packing.startswith("mx") and bits == 8:
        return QuantFormat("e4m3", "group", (1, 32), "e8m0", activations=activations)
    if packing not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
        raise Unreadable(f"compressed-tensors' format {packing!r} is not read")
    if (kind, bits) not in (("float", 8), ("int", 8), ("int", 4)) or (
        bits == 4 and packing != "pack-quantized"
    ):
        raise Unreadable(f"{bits}-bit {kind} weights packed as {packing} are not read")
    block = weights.get("block_structure")
    shapes: dict[str, tuple[Any, tuple[int, int]]] = {
        "tensor": ("tensor", (0, 0)),
        "channel": ("channel", (1, 0)),
        "group": ("group", (1, size or 0)),
        "block": ("block", tuple(block) if isinstance(block, list) and len(block) == 2 else BLOCK),
    }
    if strategy not in shapes:
        raise Unreadable(f"scales by {strategy!r} of {bits}-bit {kind} weights are not read")
    return QuantFormat(
        "e4m3" if kind == "float" else f"int{bits}",
        *shapes[strategy],
        zero_point=not symmetric,
        act_order=weights.get("actorder") in ("group", True),
        packing="pack32" if packing == "pack-quantized" else "block" if strategy == "block" else "plain",
        activations=activations,
    )


def _input_format(inputs: Mapping[str, Any] | None, *, is_mx: bool) -> InputFormat | None:
    """is_mx: weights have powers of two as scales, and so have inputs."""
    if not inputs:
        return None
    name = {("float", 8): "e4m3", ("float", 4): "e2m1", ("int", 8): "int8", ("int", 4): "int4"}.get(
        (str(inputs.get("type", "int")), inputs.get("num_bits", 8)), "other"
    )
    size = inputs.get("group_size")
    group = size if isinstance(size, int) and size > 0 else 0
    if is_mx:
        return InputFormat(name, group or 32, "e8m0")
    if name == "e2m1":  # NVFP4: `dynamic` is "local", and the factor of the whole tensor is stored
        return InputFormat(name, group or 16, "e4m3", static=True)
    has_zeros = name.startswith("int") and not inputs.get("symmetric", True)
    return InputFormat(name, group, static=not inputs.get("dynamic"), zero_point=has_zeros)


def _modelopt(settings: Mapping[str, Any]) -> Read:
    """hf_quant_config.json, or its settings within config.json."""
    algorithm = str(settings["quant_algo"]).upper()
    if algorithm != "MIXED_PRECISION":
        return (), _modelopt_format(algorithm, settings.get("group_size"))
    by_format: dict[QuantFormat, list[str]] = {}
    for module, entry in dict(settings.get("quantized_layers") or {}).items():
        found = _modelopt_format(str(entry.get("quant_algo")).upper(), entry.get("group_size"))
        by_format.setdefault(found, []).append(module)
    otherwise = _fp8(settings)[1] if settings.get("quant_method") == "fp8" else None
    return tuple(Rule(tuple(modules), format) for format, modules in by_format.items()), otherwise


def _modelopt_format(algorithm: str, size: Any) -> QuantFormat:
    if algorithm == "FP8":
        return fp8_format("tensor", static=True)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return fp8_format("channel")
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        if size not in (None, 16):
            raise Unreadable(f"NVFP4 with groups of {size} is not read; its groups have 16 weights")
        rounded = InputFormat("e2m1", 16, "e4m3", static=True)
        return replace(NVFP4, activations=rounded if algorithm == "NVFP4" else None)
    if algorithm == "MXFP8":
        return QuantFormat("e4m3", "group", (1, 32), "e8m0", activations=InputFormat("e4m3", 32, "e8m0"))
    raise Unreadable(
        f"ModelOpt's {algorithm} is not read; FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4 and MXFP8 are"
    )


_READERS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}
METHODS = tuple(_READERS)


@lru_cache(maxsize=4096)
def _pattern(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        return re.compile(pattern[3:])
    if "*" in pattern:
        return re.compile(rf"(?:.*\.)?{fnmatch.translate(pattern)}")
    return re.compile(rf"(?:.*\.)?{re.escape(pattern)}(?:\..*)?$")


def _matches(pattern: str, module: str) -> bool:
    """re: a regular expression from the start of the name; *: any text; else whole parts of a dotted name."""
    try:
        return _pattern(pattern).match(module) is not None
    except re.error:
        return False


def _texts(value: Any) -> Iterable[str]:
    return (item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
