"""GraphRecording: one CUDA graph, captured on a separate stream so that steps can run between two pieces.

Capture in relaxed mode belongs to the stream, not to the thread: what this thread launches on the runner's
stream meanwhile runs as usual. Made by the CUDA runner for `StepGraphs`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class GraphRecorder:
    """Makes recordings that share a stream and a memory pool."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> GraphRecording:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.stream(
                self._stream
            ):  # cuBLAS takes its workspace for this stream outside of the pool
                square = torch.zeros(16, 16, dtype=self._dtype, device=self._device)
                torch.mm(square, square)
        return GraphRecording(self._stream, self._pool)


class GraphRecording:
    def __init__(self, stream: torch.cuda.Stream, pool: object) -> None:
        self._stream = stream
        # Instantiated apart from the end of the capture: each is a piece of work.
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            # Not torch.cuda.graph(): it synchronizes the device and collects garbage, with steps in flight.
            self._graph.capture_begin(pool=pool, capture_error_mode="relaxed")  # type: ignore[arg-type]
        self._is_open = True

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def end(self) -> None:
        self._is_open = False
        with torch.cuda.stream(self._stream):
            self._graph.capture_end()

    def instantiate(self) -> None:
        self._graph.instantiate()

    def replay(self) -> None:
        self._graph.replay()

    def abandon(self) -> None:
        if self._is_open:
            with contextlib.suppress(Exception):  # its error would hide the original one
                self.end()
