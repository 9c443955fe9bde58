"""A checkpoint as packed weights for the native library, cached on disk so that the next start only reads
them.

The engine calls `native_refusal` to choose its backend, `plan_packed` for the size before memory is
allocated, and the plan's `load`. Every tensor is checked before a kernel reads it. Never imports torch.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ridgeline.models.spec.coverage import refusal
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights import packed_cache
from ridgeline.models.weights.packed_file import Header, PackedImage, Section
from ridgeline.models.weights.packed_formats import FORMAT_NAMES, POLICIES
from ridgeline.models.weights.packed_plan import ROPE_DIVISORS, fused_tensors
from ridgeline.models.weights.packed_table import decoder_table
from ridgeline.ops.cpu.library import (
    GROUP_SIZE,
    DecoderTable,
    Floats,
    Format,
    KvFormat,
    PackedMatrix,
)

__all__ = ["POLICIES", "PackedDecoder", "PackedPlan", "load_packed", "native_refusal", "plan_packed"]

Progress = Callable[[int, int], None]

MAX_HEAD_DIM = 256
MAX_RAGGED_WIDTH = 1 << 14  # longer rows must be whole groups


def native_refusal(spec: ModelSpec) -> str | None:
    """Why the native library cannot compute this model; None if it can."""
    if (reason := refusal(spec, "native")) is not None:
        return reason
    experts = (layer.ffn.size for layer in spec.layers if isinstance(layer.ffn, Experts))
    for width in (spec.hidden_size, spec.ffn_size, spec.num_heads * spec.head_dim, *experts):
        if width % GROUP_SIZE and width > MAX_RAGGED_WIDTH:
            return f"the native library needs rows of whole groups of {GROUP_SIZE} weights, not {width}"
    if spec.head_dim % 2 or spec.head_dim > MAX_HEAD_DIM:
        return f"the native library needs an even head size up to {MAX_HEAD_DIM}, not {spec.head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class PackedDecoder:
    """Weights in the native library's layout. Owns their memory."""

    spec: ModelSpec
    image: PackedImage
    from_cache: bool
    notes: tuple[str, ...]  # what was rounded, and why nothing was cached; for the start-up message

    @property
    def nbytes(self) -> int:
        return self.image.header.weights_bytes

    @property
    def bytes_per_step(self) -> int:
        """The bytes read by a decode step of one sequence: all except an embedding that is not also the head,
        learned positions, and the experts that a token does not choose."""
        return sum(self._read(s) for s in self.image.header.sections if not s.is_looked_up)

    def _read(self, section: Section) -> int:
        if ".experts_" not in section.name:
            return section.nbytes
        ffn = self.spec.layers[int(section.name.split(".")[1])].ffn
        assert isinstance(ffn, Experts)
        return section.nbytes * ffn.per_token // ffn.num

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Bytes of matrices by the name of their format, largest first."""
        return {FORMAT_NAMES[format]: count for format, count in self._formats().most_common()}

    @property
    def main_format(self) -> Format:
        """The format of most bytes."""
        return self._formats().most_common(1)[0][0]

    def _formats(self) -> Counter[Format]:
        counted: Counter[Format] = Counter()
        for name in self._matrix_names():
            matrix = self.image.matrix(name)
            counted[matrix.format] += matrix.data.nbytes
        return counted

    @property
    def embedding(self) -> PackedMatrix:
        return self.image.matrix("embedding")

    @property
    def final_norm(self) -> Floats:
        return self.image.vector("final_norm")

    def matrix(self, layer: int, name: str) -> PackedMatrix:
        """A matrix of a layer by its name in the packed plan (qkv, output, gate_up, …), with its bias."""
        return self.image.matrix(f"layers.{layer}.{name}")

    def norm(self, layer: int, name: str) -> Floats | None:
        return self.image.optional_vector(f"layers.{layer}.{name}")

    def table(
        self,
        *,
        max_context: int,
        num_blocks: int,
        max_step_tokens: int,
        kv_format: KvFormat = KvFormat.BF16,
        deterministic: bool = False,
    ) -> DecoderTable:
        """The whole decoder as the library's table."""
        return decoder_table(
            self.spec,
            self.image,
            max_context=max_context,
            num_blocks=num_blocks,
            max_step_tokens=max_step_tokens,
            kv_format=kv_format,
            deterministic=deterministic,
        )

    def _matrix_names(self) -> Iterator[str]:
        return (fused.name for fused in fused_tensors(self.spec) if fused.is_matrix)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """Packed weights before they are in memory: found on disk, or of known size and yet to be packed."""

    nbytes: int
    from_cache: bool
    load: Callable[[Progress | None], PackedDecoder]


def load_packed(
    path: Path,
    spec: ModelSpec,
    weights: str = "auto",
    progress: Progress | None = None,
    *,
    keep: bool = True,
) -> PackedDecoder:
    """Read a checkpoint: a directory in Hugging Face layout, a .safetensors file or a .gguf file.

    weights:  one of POLICIES
    progress: called with (weights packed, total weights)
    keep:     use and fill the cache on disk
    """
    return plan_packed(path, spec, weights, keep=keep).load(progress)


def plan_packed(path: Path, spec: ModelSpec, weights: str = "auto", *, keep: bool = True) -> PackedPlan:
    """The part of `load_packed` that allocates no memory."""
    if weights not in POLICIES:
        raise ValueError(f"unknown weights setting {weights!r}; use one of {', '.join(POLICIES)}")
    key: packed_cache.Key = {}
    if keep:
        with contextlib.suppress(OSError):  # a file that cannot be read is reported when it is opened below
            key = packed_cache.source_key(path, spec, weights)
    header = packed_cache.find_entry(key) if key else None
    if header is not None and _fits(header, spec):
        return PackedPlan(
            header.weights_bytes, True, lambda progress: _kept_or_packed(path, spec, weights, key, progress)
        )
    from ridgeline.models.weights.packed_writer import Packing  # most starts do not need it

    packing = Packing(path, spec, weights, key)

    def load(progress: Progress | None) -> PackedDecoder:
        image, notes = packing.run(progress)
        return PackedDecoder(spec, image, False, notes)

    return PackedPlan(packing.header.weights_bytes, False, load)


def _kept_or_packed(
    path: Path, spec: ModelSpec, weights: str, key: packed_cache.Key, progress: Progress | None
) -> PackedDecoder:
    """The cached weights; packed again if the cache entry is gone or damaged."""
    image = packed_cache.load_entry(key)
    if image is None:
        from ridgeline.models.weights.packed_writer import Packing

        image, notes = Packing(path, spec, weights, key).run(progress)
        return PackedDecoder(spec, image, False, notes)
    if progress is not None:
        progress(spec.parameters, spec.parameters)
    return PackedDecoder(spec, image, True, image.header.notes)


def _fits(header: Header, spec: ModelSpec) -> bool:
    """Whether an entry has the matrices and vectors of this model, with its shapes."""
    expected = {fused.name: (fused.n, fused.k) for fused in fused_tensors(spec)}
    found = {section.name: (section.n, section.k) for section in header.sections}
    found.pop(ROPE_DIVISORS, None)
    return found == expected
