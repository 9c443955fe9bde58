"""Streams safetensors checkpoints to a device: several reads in flight, each copied as soon as it completes.

The result is the same as `torch_weights.load_weights`, bit for bit, with the same checks. Readers read ranges
of the files into pinned staging buffers and copy them on separate streams; conversions and the check for
values that are not finite run on the device. Besides the weights only the staging buffers use memory.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.models.errors import BrokenModel
from ridgeline.models.quantized.blocks import block_rows
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.checkpoint import (
    Progress,
    float_chunks,
    not_finite,
    open_source,
    sharded_places,
    stored_bytes,
)
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.low_bits.loading import fill_low_bits
from ridgeline.models.weights.low_bits.plan import NOTHING_LOW, LowBitPlan
from ridgeline.models.weights.mxfp4 import TYPE as MXFP4
from ridgeline.models.weights.places import Place
from ridgeline.models.weights.safetensors_source import SafetensorsSource
from ridgeline.models.weights.shards import ALONE, Rank
from ridgeline.models.weights.torch_weights import (
    Weights,
    allocate_weights,
    load_weights,
    low_target,
    stored_target,
    target_rows,
)
from ridgeline.ops.mxfp4 import BLOCK, LARGEST_SCALE, NAN_SCALE, Mxfp4

READERS = 8
CHUNK_BYTES = 16 << 20
STAGING_BUFFERS = 2  # per reader: one is filled while the other is copied
CHECK_ELEMENTS = 1 << 24  # elements checked together after a sum showed an error
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stream_weights(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device | str = "cuda",
    *,
    rank: Rank = ALONE,
    stored_experts: bool = False,
    low: LowBitPlan = NOTHING_LOW,
    readers: int = READERS,
    chunk_bytes: int = CHUNK_BYTES,
) -> Weights:
    """The checkpoint at `path` on the device. Other formats than safetensors use `load_weights`.

    `progress` is called with (elements copied, total elements), in the caller's thread. rank: reads the
    shards of one of several processes. stored_experts: the experts are MXFP4, and stay it. low: matrices that
    are kept in 8 or 4 bits.
    """
    source = open_source(path, spec)
    if not isinstance(source, SafetensorsSource):
        return load_weights(path, spec, dtype, progress, device, rank, low)
    places, shards = sharded_places(source, spec, path, rank)
    weights = allocate_weights(
        spec, dtype, device, source.rope_divisors(), places, shards, stored_experts=stored_experts, low=low
    )
    direct = {
        piece: place
        for piece, place in places.items()
        if _is_direct(source, place) and low_target(weights, piece) is None
    }
    transfer = _Transfer(torch.device(device), chunk_bytes)
    total = sum(math.prod(piece.shape) for piece in places)
    with ExitStack() as files:
        opened = {file: _open(file, files) for file in {source.where(p.name) for p in places.values()}}
        jobs = sorted(
            (
                chunk
                for piece, place in direct.items()
                for chunk in _chunks(source, place, opened, target_rows(weights, piece), chunk_bytes)
            ),
            key=lambda chunk: (chunk.path, chunk.offset),  # neighbours in a file are read in order
        )
        others = {piece: place for piece, place in places.items() if piece not in direct}
        done = 0
        for elements in _read_others(source, others, weights, low):
            done += elements
            if progress is not None:
                progress(done, total)
        # Closed before the files: no reader outlives the file it reads.
        with closing(transfer.run(jobs, readers)) as reports:
            for sent in reports:
                done += sent
                if progress is not None:
                    progress(done, total)
    if transfer.on_gpu:
        torch.cuda.empty_cache()  # frees what conversions used
    _finish(weights, spec, places, source, dtype)
    return weights


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A range of a file and the elements it becomes."""

    path: Path
    descriptor: int
    offset: int
    nbytes: int
    dtype: torch.dtype  # as stored
    out: Tensor  # flat


def _open(path: Path, files: ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _unreadable(path, error) from error
    files.callback(os.close, descriptor)
    return descriptor


def _is_direct(source: SafetensorsSource, place: Place) -> bool:
    """Whether the piece is one range of its file."""
    return place.first_row is not None and place.columns is None and source.is_verbatim(place.name)


def _read_others(
    source: SafetensorsSource, places: dict[Piece, Place], weights: Weights, low: LowBitPlan
) -> Iterator[int]:
    """Read the pieces that are not one range of a file, or are packed; yields the elements of each."""
    for piece, place in places.items():
        if (stored := stored_target(weights, piece)) is not None:
            _read_stored(source, piece, place, stored)
        elif (matrix := low_target(weights, piece)) is not None:
            fill_low_bits(matrix, source, piece, place, as_stored=(piece.layer, piece.field) in low.stored)
        else:
            flat = target_rows(weights, piece).view(-1)
            for first, values in float_chunks(source, piece, place):
                flat[first : first + len(values)].copy_(torch.from_numpy(values))
        yield math.prod(piece.shape)


def _read_stored(source: SafetensorsSource, piece: Piece, place: Place, matrix: Mxfp4) -> None:
    """An expert's rows as MXFP4 blocks; the device brings them to its order."""
    quantized = source.matrix(place.name)
    if quantized is None and source.type_of(place.name) != MXFP4:
        raise BrokenModel(
            f"{source.where(place.name)}: tensor {place.name} is stored as {source.type_of(place.name)}, but "
            "config.json says mxfp4"
        )
    if quantized is None:
        stored = stored_bytes(source, piece, place)
    else:
        rows = np.arange(piece.shape[0]) if place.rows is None else place.rows
        stored = np.ascontiguousarray(block_rows(quantized, MXFP4, rows)).reshape(-1)
    blocks = torch.from_numpy(stored).to(matrix.words.device)
    blocks = blocks.view(piece.shape[0], piece.shape[1] // BLOCK, -1)
    scale = int(blocks[..., 0].max())
    if scale == NAN_SCALE:
        raise not_finite(source, place.name, MXFP4)
    if scale > LARGEST_SCALE:
        raise BrokenModel(
            f"{source.where(place.name)}: tensor {place.name} has the MXFP4 scale 2^{scale - 127} (byte "
            f"{scale}); the GPU computes scales up to 2^{LARGEST_SCALE - 127}. Check the file, or serve it "
            "with --weights bfloat16"
        )
    assert piece.expert is not None
    matrix.fill(piece.expert, piece.first_row, blocks)


def _chunks(
    source: SafetensorsSource, place: Place, opened: dict[Path, int], rows: Tensor, chunk_bytes: int
) -> Iterator[_Chunk]:
    name = place.name
    path, stored, dtype = source.where(name), source.tensor(name), _DTYPES[source.type_of(name)]
    flat = rows.view(-1)
    begin = stored.offset + (place.first_row or 0) * (len(flat) // len(rows)) * dtype.itemsize
    step = chunk_bytes // dtype.itemsize
    for first in range(0, len(flat), step):
        out = flat[first : first + step]
        yield _Chunk(
            path=path,
            descriptor=opened[path],
            offset=begin + first * dtype.itemsize,
            nbytes=len(out) * dtype.itemsize,
            dtype=dtype,
            out=out,
        )


class _Transfer:
    """The readers. On a GPU every reader has a stream; on the CPU copies are synchronous."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self.on_gpu = device.type == "cuda"
        self._reports: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def run(self, jobs: list[_Chunk], readers: int) -> Generator[int, None, None]:
        """Yields elements copied, chunk by chunk. Raises a reader's error after all of them have ended."""
        todo: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        for job in jobs:
            todo.put(job)
        threads = [
            threading.Thread(target=self._read_all, args=(todo,), name=f"weights-{i}", daemon=True)
            for i in range(max(1, min(readers, len(jobs))))
        ]
        for _ in threads:
            todo.put(None)
        for thread in threads:
            thread.start()
        try:
            running = len(threads)
            while running:
                report = self._reports.get()
                if isinstance(report, BaseException):
                    raise report
                if report is None:
                    running -= 1
                else:
                    yield report
        finally:
            self._stopped.set()
            for thread in threads:
                thread.join()

    def _read_all(self, todo: queue.SimpleQueue[_Chunk | None]) -> None:
        try:
            with ExitStack() as context:
                stream: Any = None
                if self.on_gpu:
                    stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                    context.enter_context(torch.cuda.stream(stream))
                buffers = [_Staging(self._chunk_bytes, stream) for _ in range(STAGING_BUFFERS)]
                turn = 0
                while not self._stopped.is_set() and (chunk := todo.get()) is not None:
                    buffers[turn].send(chunk)
                    turn = (turn + 1) % STAGING_BUFFERS
                    self._reports.put(len(chunk.out))
                if stream is not None:
                    stream.synchronize()
        except BaseException as error:
            self._reports.put(error)
        else:
            self._reports.put(None)


class _Staging:
    """Host memory that chunks pass through, pinned if a GPU copies from it."""

    def __init__(self, nbytes: int, stream: Any) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=stream is not None)
        self._bytes = self._memory.numpy().data
        self._stream = stream
        self._sent: Any = None if stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, chunk: _Chunk) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # the previous content has been copied
        _read(chunk, self._bytes[: chunk.nbytes])
        stored = self._memory[: chunk.nbytes].view(chunk.dtype)
        if chunk.dtype == chunk.out.dtype:
            chunk.out.copy_(stored, non_blocking=True)
        else:
            there = stored.to(chunk.out.device, non_blocking=True)
            if there.dtype == torch.float64:
                there = there.float()  # all loaders go through float32, so that rounding is the same
            chunk.out.copy_(there)
        if self._sent is not None:
            self._sent.record(self._stream)


def _read(chunk: _Chunk, into: memoryview) -> None:
    """Fill the buffer. A file truncated since it was opened ends early; mapping it would be a SIGBUS."""
    done = 0
    while done < chunk.nbytes:
        try:
            count = os.preadv(chunk.descriptor, [into[done:]], chunk.offset + done)
        except OSError as error:
            raise _unreadable(chunk.path, error) from error
        if count == 0:
            raise BrokenModel(
                f"{chunk.path}: is not a complete safetensors file (it ended at byte {chunk.offset + done} "
                "while it was read); it is truncated or altered; download it again"
            )
        done += count


def _unreadable(path: Path, error: OSError) -> BrokenModel:
    return BrokenModel(
        f"{path}: cannot be read: {error.strerror}; check the disk, or download the file again"
    )


def _finish(
    weights: Weights,
    spec: ModelSpec,
    places: dict[Piece, Place],
    source: SafetensorsSource,
    dtype: torch.dtype,
) -> None:
    """Finish the norms, and check every tensor: one sum each, read together."""
    sums = []
    checked = {
        piece: place
        for piece, place in places.items()
        if stored_target(weights, piece) is None and low_target(weights, piece) is None
    }
    for piece in checked:
        rows = target_rows(weights, piece)
        if piece.is_norm and spec.norm.offset:
            rows += spec.norm.offset
        # In float64 a GPU would first make a wide copy of the tensor.
        sums.append(rows.sum(dtype=torch.float32))
    finite = torch.isfinite(torch.stack(sums)).tolist()
    for (piece, place), is_finite in zip(checked.items(), finite, strict=True):
        # Large finite values may overflow a float32 sum: then each element is checked.
        if not is_finite and not _all_finite(target_rows(weights, piece)):
            raise not_finite(source, place.name, str(dtype).removeprefix("torch."))


def _all_finite(rows: Tensor) -> bool:
    flat = rows.view(-1)
    return all(
        bool(torch.isfinite(flat[first : first + CHECK_ELEMENTS]).all())
        for first in range(0, len(flat), CHECK_ELEMENTS)
    )
