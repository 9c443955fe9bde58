"""Packs a checkpoint into a cache file, or into memory if no file can be stored.

Called by `packed` when the cache has no entry. Chunks of panels are packed on all cores; the file gets its
name only when it is complete and synced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights import packed_cache
from ridgeline.models.weights.checkpoint import Progress, TensorSource, checked_places, open_source
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.packed_file import (
    FileTarget,
    Header,
    MemoryTarget,
    PackedImage,
    Section,
    lay_out,
)
from ridgeline.models.weights.packed_plan import ROPE_DIVISORS, Fused, fused_tensors, looked_up
from ridgeline.models.weights.packing import FusedMatrix, conversion_notes, read_vector
from ridgeline.models.weights.places import Place
from ridgeline.ops.cpu.library import Bytes, Floats

MAX_PACKING_THREADS = 8
DROPPED_WEIGHTS = 64 << 20  # packed between two drops of the checkpoint's pages


class _Target(Protocol):
    def write(self, offset: int, data: Bytes) -> None: ...


class Packing:
    """The packing of one checkpoint into a file, or into memory if no file can be stored."""

    def __init__(self, path: Path, spec: ModelSpec, weights: str, key: packed_cache.Key) -> None:
        """Opens the checkpoint, checks it and plans its layout; an empty key stores nothing on disk."""
        self._path, self._spec, self._weights = path, spec, weights
        self._source: TensorSource | None = None
        self._open()
        sections = lay_out(
            [(m.name, m.format, m.n, m.k) for m in self._matrices],
            [(name, len(values)) for name, values in self._vectors.items()],
            looked_up(spec),
        )
        self.header = Header(key, tuple(sections), conversion_notes(self._matrices))

    def run(self, progress: Progress | None) -> tuple[PackedImage, tuple[str, ...]]:
        """The packed weights, and notes about them. Call once: the checkpoint is closed afterwards."""
        try:
            return self._packed(progress)
        finally:
            self._close()

    def _open(self) -> None:
        source = self._source = open_source(self._path, self._spec)
        places = checked_places(source, self._spec, self._path)
        fused = list(fused_tensors(self._spec))
        self._matrices = [
            FusedMatrix(each, source, places, self._weights) for each in fused if each.is_matrix
        ]
        self._vectors = _read_vectors(fused, source, places, self._spec)

    def _close(self) -> None:
        self._matrices, self._vectors = [], {}
        self._source = None  # this releases its mappings

    def _packed(self, progress: Progress | None) -> tuple[PackedImage, tuple[str, ...]]:
        notes = self.header.notes
        if self.header.key and self.header.payload_bytes >= packed_cache.MIN_ENTRY_BYTES:
            try:
                return self._into_file(progress), notes
            except OSError as error:
                notes += (
                    f"packed weights could not be stored on disk ({error.strerror or error}: "
                    f"{packed_cache.packed_dir()}); the next start packs them again",
                )
        if not self._matrices:
            self._open()
        target = MemoryTarget(self.header)
        self._fill(target, progress)
        return target.image(), notes

    def _into_file(self, progress: Progress | None) -> PackedImage:
        temporary = packed_cache.temporary_path(self.header.key, self.header.payload_bytes)
        try:
            target = FileTarget(temporary, self.header)
            try:
                self._fill(target, progress)
                target.sync()
            finally:
                target.close()
            packed_cache.keep_entry(self.header.key, temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._close()  # first: the pages of checkpoint and entry together would be twice the model's size
        image = packed_cache.load_entry(self.header.key)
        if image is None:
            raise OSError("the file just written could not be read")
        return image

    def _fill(self, target: _Target, progress: Progress | None) -> None:
        sections = {section.name: section for section in self.header.sections}
        for name, values in self._vectors.items():
            target.write(sections[name].offset, values.view(np.uint8))
        done, total = sum(values.size for values in self._vectors.values()), self._spec.parameters
        dropped = done
        with ThreadPoolExecutor(_packing_threads()) as pool:
            try:
                for weights in pool.map(
                    lambda chunk: _pack_chunk(target, *chunk), _chunks(self._matrices, sections)
                ):
                    done += weights
                    if self._source is not None and done - dropped > DROPPED_WEIGHTS:
                        self._source.drop_pages()
                        dropped = done
                    if progress is not None:
                        progress(min(done, total), total)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        if progress is not None:
            progress(total, total)


def _chunks(
    matrices: Sequence[FusedMatrix], sections: dict[str, Section]
) -> Iterator[tuple[FusedMatrix, int, int, int]]:
    """(matrix, first row, last row, offset of the matrix) of everything to pack."""
    for matrix in matrices:
        for first, last in matrix.chunks():
            yield matrix, first, last, sections[matrix.name].offset


def _pack_chunk(target: _Target, matrix: FusedMatrix, first: int, last: int, offset: int) -> int:
    if first == 0:
        matrix.check()
    target.write(offset + matrix.offset(first), matrix.pack(first, last))
    return (last - first) * matrix.k


def _read_vectors(
    fused: Sequence[Fused], source: TensorSource, places: dict[Piece, Place], spec: ModelSpec
) -> dict[str, Floats]:
    vectors = {}
    for each in fused:
        if not each.is_matrix:
            offset = spec.norm.offset if each.parts[0].is_norm else 0.0
            vectors[each.name] = read_vector(each, source, places, offset)
    divisors = source.rope_divisors()
    if divisors is not None:
        vectors[ROPE_DIVISORS] = divisors
    return vectors


def _packing_threads() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, MAX_PACKING_THREADS)
