"""Which matrices a GPU keeps in 8 or 4 bits, and in which format: decided before a weight is read.

As a file stores them, where a kernel computes that format; rounded when they are loaded, where `--weights`
asks for it; in 16 bits otherwise. Embeddings, the head, norms and routers always stay in 16 bits, and so does
what the policy keeps. Rows that lie in one matrix (queries, keys, values) must have one format. Imports no
torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.quantized.packings import StoredMatrix
from ridgeline.models.spec.families import FAMILIES
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.checkpoint import TensorSource
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.low_bits.keep_policy import PART_OF, KeepPolicy
from ridgeline.models.weights.places import Place, find_places
from ridgeline.ops.low_bit_formats import ONLINE, PLANE, LowBitFormat, padded_columns

Matrix = tuple[int, str]  # the layer, and the field of LayerWeights


@dataclass(frozen=True, slots=True)
class LowBitPlan:
    """formats: of the matrices that are kept
    stored:  of them, those that a file has in this format; the others are rounded
    ordered: those whose columns are in another order (act-order)
    mxfp4_experts: all experts are stored in MXFP4, and kept in it; a policy keeps all of them or none
    notes:   how many matrices are computed in which way, for the start-up message
    """

    formats: Mapping[Matrix, LowBitFormat] = field(default_factory=dict)
    stored: frozenset[Matrix] = frozenset()
    ordered: frozenset[Matrix] = frozenset()
    mxfp4_experts: bool = False
    notes: tuple[str, ...] = ()

    def of_layer(self, layer: int) -> tuple[tuple[str, LowBitFormat, bool], ...]:
        """What distinguishes the kernels of a layer from those of others of its kind."""
        own = [(name, each) for (number, name), each in self.formats.items() if number == layer]
        return tuple((name, each, (layer, name) in self.ordered) for name, each in own)

    def of_layers(self, layers: Sequence[int]) -> LowBitPlan:
        """The plan of a model whose layers are these, in this order."""
        every = [
            (new, old, name)
            for new, old in enumerate(layers)
            for number, name in self.formats
            if number == old
        ]
        ordered = frozenset((new, name) for new, old, name in every if (old, name) in self.ordered)
        return LowBitPlan({(new, name): self.formats[old, name] for new, old, name in every}, ordered=ordered)

    def format_of(self, piece: Piece) -> LowBitFormat | None:
        return None if piece.layer is None else self.formats.get((piece.layer, piece.field))


NOTHING_LOW = LowBitPlan()
SIXTEEN_BITS = "16 bits"
_FLOATS = {"F64": "64 bits", "F32": "32 bits", "F16": SIXTEEN_BITS, "BF16": SIXTEEN_BITS}
_EXPANDED_BY_POLICY = "experts stored as MXFP4 are expanded to 16 bits: the policy keeps them"


def low_bit_plan(
    spec: ModelSpec,
    weights: str,
    keep: Iterable[str] = (),
    source: TensorSource | None = None,
    *,
    has_fp8: bool = True,
) -> LowBitPlan:
    """weights: auto, or a key of ONLINE. source: the opened checkpoint; None: random weights of the spec's
    format.

    has_fp8: whether the GPU multiplies FP8; if not, what is stored in it is expanded.
    """
    policy = KeepPolicy(keep)
    if weights == "auto" and spec.weight_format == "mxfp4":  # gpt-oss: nothing else is quantized
        is_kept = policy.kept_experts(spec) != "all"
        note = "experts are computed as stored, in MXFP4" if is_kept else _EXPANDED_BY_POLICY
        return LowBitPlan(mxfp4_experts=is_kept, notes=(note,))
    if weights not in ("auto", *ONLINE) or (weights == "auto" and spec.quantization is None):
        return NOTHING_LOW
    pieces = _matrices(spec, source)
    formats: dict[Matrix, LowBitFormat] = {}
    stored: set[Matrix] = set()
    ordered: set[Matrix] = set()
    outcomes: Counter[str] = Counter()
    mxfp4_experts = weights == "auto" and _experts_in_mxfp4(spec, source, pieces)
    mxfp4_experts = mxfp4_experts and policy.kept_experts(spec) != "all"
    for matrix, places in pieces.items():
        expert = PART_OF[matrix[1]] == "experts"
        if mxfp4_experts and expert:
            outcomes["of experts are computed as stored, in MXFP4 with inputs in 16 bits"] += 1
            continue
        found = [_stored_format(spec, source, piece, place) for piece, place in places]
        kept, is_ordered, why = _common(found, expert=expert)
        if kept is not None and kept.element == "fp8" and not has_fp8:
            kept, why = None, "this GPU does not multiply FP8"
        chosen = kept
        if weights in ONLINE and (kept is None or kept.element != weights):
            chosen, is_ordered = ONLINE[weights], False
        if refused := _why_wide(spec, matrix, chosen, policy):
            chosen, why = None, refused
        flag = f"--weights {weights}" if weights in ONLINE and chosen is not kept else ""
        text, asked = _stored_as(spec, source, places), _asked_inputs(spec, source, places)
        if outcome := _outcome(text, chosen, flag, why, asked):
            outcomes[outcome] += 1
        if chosen is None:
            continue
        formats[matrix] = chosen
        if is_ordered:
            ordered.add(matrix)
        if chosen is kept:
            stored.add(matrix)
    notes = tuple(f"{count} matrices {text}" for text, count in outcomes.items())
    return LowBitPlan(formats, frozenset(stored), frozenset(ordered), mxfp4_experts, notes)


def _why_wide(spec: ModelSpec, matrix: Matrix, format: LowBitFormat | None, policy: KeepPolicy) -> str:
    """Why a matrix that may be kept in this format is not; empty if it is."""
    if policy.keeps(*matrix):
        return "the policy keeps them"
    ffn = spec.layers[matrix[0]].ffn
    if format is None or PART_OF[matrix[1]] != "experts" or not isinstance(ffn, Experts):
        return ""
    if format.element == "int4":
        return "experts are not computed in int4"
    return "experts whose inputs are scaled are not computed in 8 bits" if ffn.router.scales_input else ""


def _outcome(stored: str, chosen: LowBitFormat | None, flag: str, why: str, asked: str) -> str:
    """What becomes of a matrix, for a note; empty for floats that nothing asks to be kept in fewer bits.

    stored: in a file. flag: what asks for other bits. asked: how the file asks for inputs to be rounded.
    """
    if chosen is not None and flag:
        return f"stored as {stored} are rounded to {chosen} ({flag})"
    if chosen is not None:
        inputs = f", not in {asked} as the file asks" if asked and not chosen.inputs else ""
        return f"stored as {stored} are computed as stored, in {chosen}{inputs}"
    if stored in _FLOATS.values():
        verb = "stay in" if stored == SIXTEEN_BITS else "are rounded to"
        return f"stored as {stored} {verb} 16 bits: {why}" if why else ""
    inputs = f"; inputs are not rounded to {asked}, as the file asks" if asked else ""
    return f"stored as {stored} are expanded to 16 bits: {why or 'no GPU kernel computes it'}{inputs}"


def _matrices(spec: ModelSpec, source: TensorSource | None) -> dict[Matrix, list[tuple[Piece, Place]]]:
    places = source.places() if source is not None else find_places(spec, FAMILIES[spec.family].hf_names)
    found: dict[Matrix, list[tuple[Piece, Place]]] = {}
    for piece, place in places.items():
        if piece.layer is not None and piece.field in PART_OF:
            found.setdefault((piece.layer, piece.field), []).append((piece, place))
    return found


Found = tuple[LowBitFormat | None, tuple[int, ...] | None]  # the format, and the groups of its columns


def _experts_in_mxfp4(
    spec: ModelSpec,
    source: TensorSource | None,
    pieces: dict[Matrix, list[tuple[Piece, Place]]],
) -> bool:
    """Whether there are experts and all of them are E2M1 with a power of two for each 32 columns."""
    experts = [(matrix, places) for matrix, places in pieces.items() if PART_OF[matrix[1]] == "experts"]
    found = {_quant_format(spec, source, place) for _, places in experts for _, place in places}
    for (layer, _), _ in experts:
        ffn = spec.layers[layer].ffn
        if not isinstance(ffn, Experts) or ffn.router.scales_input:
            return False
    return bool(found) and all(
        format is not None and (format.element, format.scale, format.group) == ("e2m1", "e8m0", (1, 32))
        for format in found
    )


def _quant_format(spec: ModelSpec, source: TensorSource | None, place: Place) -> QuantFormat | None:
    """The file's format of a matrix; without a file, the one that the settings give it."""
    if source is None:
        scheme = spec.quantization
        return None if scheme is None else scheme.format_of(place.name.removesuffix(".weight"))
    matrix = source.matrix(place.name)
    return None if matrix is None else matrix.format


def _stored_format(spec: ModelSpec, source: TensorSource | None, piece: Piece, place: Place) -> Found:
    if place.columns is not None:
        return None, None
    if source is None:
        format = _quant_format(spec, source, place)
        return (None if format is None else device_format(format, piece.shape[1])), None
    matrix = source.matrix(place.name)
    if matrix is None:
        return None, None
    groups = matrix.read(np.arange(1)).groups if matrix.is_act_order else None
    return _format_of_matrix(matrix), None if groups is None else tuple(groups.tolist())


def _stored_as(spec: ModelSpec, source: TensorSource | None, places: list[tuple[Piece, Place]]) -> str:
    """What a file has the parts of a matrix in; of random weights the settings' format."""
    names = []
    for _, place in places:
        if (format := _quant_format(spec, source, place)) is not None:
            names.append(str(format))
        else:
            kind = "BF16" if source is None else source.type_of(place.name)
            names.append(_FLOATS.get(kind, kind))
    return " and ".join(sorted(set(names)))


def _asked_inputs(spec: ModelSpec, source: TensorSource | None, places: list[tuple[Piece, Place]]) -> str:
    """The types that a file asks inputs to be rounded to; empty if none."""
    formats = (_quant_format(spec, source, place) for _, place in places)
    asked = {format.activations.name for format in formats if format is not None and format.activations}
    return " and ".join(sorted(asked))


def _common(found: list[Found], *, expert: bool) -> tuple[LowBitFormat | None, bool, str]:
    """(the format that all pieces have, whether columns are reordered, why there is none)."""
    kinds = {format for format, _ in found}
    orders = {groups for _, groups in found}
    if len(kinds) > 1 or len(orders) > 1:
        return None, False, "parts of a fused matrix differ"
    (format,), (groups,) = kinds, orders
    if format is None:
        return None, False, ""
    if expert and format.element == "int4":
        return None, False, "experts are not computed in int4"
    if groups is None:
        return format, False, ""
    sizes = Counter(groups)
    if format.element != "int4" or any(size != format.group for size in sizes.values()):
        return None, False, "its columns are in an order that has no whole groups"
    return format, True, ""


def _format_of_matrix(matrix: StoredMatrix) -> LowBitFormat | None:
    format = device_format(matrix.format, matrix.shape[1])
    if format is None or format.zeros or matrix.format.packing != "gptq":
        return format
    # GPTQ has zero points in every file; only the tensor says whether they are all in the middle.
    has_zeros = matrix.parameters(np.arange(matrix.shape[0]))[1] is not None
    if not has_zeros:
        return format
    return (
        LowBitFormat("int4", format.group, zeros=True, scale=format.scale)
        if format.element == "int4"
        else None
    )


def device_format(format: QuantFormat, columns: int) -> LowBitFormat | None:
    """The GPU's format with the same values; None if there is none."""
    wide = format.group[1]
    element: dict[str, Literal["fp8", "int8", "int4"]] = {"e4m3": "fp8", "int8": "int8", "int4": "int4"}
    kind = element.get(format.element)
    if kind is None or wide % PLANE or format.tensor_scale or format.packing in ("bnb4", "bnb8"):
        return None
    if kind == "int4":
        scale = format.scale if format.scale in ("float16", "bfloat16") else "float32"
        return LowBitFormat("int4", wide or padded_columns(columns), zeros=format.zero_point, scale=scale)
    if format.zero_point or format.act_order:
        return None
    asked = format.activations
    same = asked is not None and (asked.element, asked.scale) == (format.element, "float32")
    same = same and asked is not None and not asked.zero_point
    # Static steps are replaced by those of each token; another grouping than the weights' is not computed.
    fits = same and asked is not None and (asked.group == wide or (asked.static and not wide))
    return LowBitFormat(kind, wide, inputs=fits)
