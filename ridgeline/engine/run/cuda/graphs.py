"""DecodeGraphs: CUDA graphs of decode steps, one per batch size of a ladder, captured on demand.

A batch is padded to the next size of the ladder. The first step of a size runs eagerly (its kernels may have
to be compiled), the second is captured, later ones are replayed; an idle engine captures ahead. All graphs
share one memory pool. Used only by the CUDA runner.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def ladder(most: int) -> list[int]:
    """Batch sizes that have a graph: 1, 2, 4, 8, then every 8th up to 256, every 32nd beyond."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, most + 32, 32)]
    return [size for size in sizes if size < most] + [next(size for size in sizes if size >= most)]


class GraphKey(NamedTuple):
    size: int  # tokens, whatever rows they belong to
    shares_prefix: bool = False
    verifies: bool = False


class DecodeGraphs:
    def __init__(self, run: Callable[[GraphKey], Tensor], sizes: list[int], enabled: bool) -> None:
        """`run` computes a padded decode batch from the permanent input buffers and returns its logits."""
        self._run = run
        self._sizes = sizes
        self._enabled = enabled
        self._seen: set[GraphKey] = set()
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._given_up: set[GraphKey] = set()
        self._pool: Any = None
        self.capture_s = 0.0
        self.replays = 0
        self.eager = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def padded(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def step(self, key: GraphKey) -> Tensor:
        """The logits of the batch in the input buffers."""
        known = self._graphs.get(key)
        if known is None and self._enabled and key in self._seen and key not in self._given_up:
            known = self._try_to_capture(key)
        if known is None:
            self._seen.add(key)
            self.eager += 1
            return self._run(key)
        graph, logits = known
        graph.replay()
        self.replays += 1
        return logits

    def next_missing(self) -> GraphKey | None:
        """The smallest size without a graph, to be captured while the engine is idle."""
        if not self._enabled:
            return None
        keys = (GraphKey(size) for size in self._sizes)
        return next((key for key in keys if key not in self._graphs and key not in self._given_up), None)

    def prepare(self, key: GraphKey) -> None:
        """Run and capture a size ahead of its first use. The input buffers must hold padding only."""
        self._run(key)
        self._seen.add(key)
        self._try_to_capture(key)

    def disable(self, key: GraphKey, error: Exception) -> None:
        """Run batches of this kind eagerly from now on."""
        self._given_up.add(key)
        log.warning("could not capture a graph for batches of %d; they run eagerly: %s", key.size, error)

    def _try_to_capture(self, key: GraphKey) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        try:
            return self._capture(key)
        except Exception as error:  # most likely out of memory: a step without a graph is slower, not wrong
            self.disable(key, error)
            return None

    def _capture(self, key: GraphKey) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        started = time.monotonic()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(): it synchronizes the device and collects garbage while steps are in flight.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            logits = self._run(key)
        except BaseException:
            with contextlib.suppress(Exception):  # its error would hide the original one
                graph.capture_end()
            raise
        graph.capture_end()
        self._graphs[key] = graph, logits
        self.capture_s += time.monotonic() - started
        log.debug("captured a graph for %s in %.0f ms", key, 1e3 * (time.monotonic() - started))
        return self._graphs[key]
