"""StepGraphs: CUDA graphs of small steps, one per shape of a ladder, captured on demand and while idle.

A shape is a number of decode rows and a number of prompt tokens, each padded to the next of its ladder. The
first step of a shape runs eagerly (its kernels may have to be compiled), the second is captured, later ones
are replayed. An idle engine captures ahead, the shapes that steps missed most often first, in pieces of a
layer: `advance` makes one, and steps may run between two of them. All graphs share one memory pool. Used only
by the CUDA runner.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor

log = logging.getLogger(__name__)

PROMPT_TOKENS = (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
# Beside decodes, where each size exists once for every number of decodes: fewer of them.
MIXED_TOKENS = (32, 64, 128, 256, 512, 768, 1024)
MIXED_DECODES = (8, 16, 32, 64, 128, 256)
FIRST_DECODES = 8  # batches that are captured before prompts


def ladder(most: int) -> list[int]:
    """Batch sizes that have a graph: 1, 2, 4, 8, then every 8th up to 256, every 32nd beyond."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, most + 32, 32)]
    return [size for size in sizes if size < most] + [next(size for size in sizes if size >= most)]


class GraphKey(NamedTuple):
    size: int  # decode rows, or tokens of rows with drafts; padding included
    shares_prefix: bool = False
    verifies: bool = False
    prompt_tokens: int = 0  # tokens of other rows, padding included


class Recording(Protocol):
    """One graph while it is captured."""

    def capturing(self) -> AbstractContextManager[object]:
        """Kernels launched inside are recorded and not run."""
        ...

    def end(self) -> None: ...

    def instantiate(self) -> None:
        """Make the recorded graph executable. After this, `replay` runs it."""
        ...

    def replay(self) -> None: ...

    def abandon(self) -> None: ...


Run = Callable[[GraphKey], Generator[None, None, Tensor]]  # yields after every layer; returns the logits


class StepGraphs:
    def __init__(
        self,
        run: Run,
        rehearse: Callable[[GraphKey], Iterator[None]],
        record: Callable[[], Recording],
        sizes: list[int],
        most_tokens: int,
        enabled: bool,
    ) -> None:
        """run: computes a padded step from the permanent input buffers. rehearse: launches each of its
        kernels once, on padding. most_tokens: of a step with prompt tokens; 0: such steps are not padded."""
        self._run, self._rehearse, self._record = run, rehearse, record
        self._sizes, self._most_tokens = sizes, most_tokens
        self._prompts = [size for size in PROMPT_TOKENS if size <= most_tokens]
        self._first = [GraphKey(size) for size in sizes if size <= FIRST_DECODES]
        self._first += [GraphKey(0, prompt_tokens=size) for size in self._prompts]
        self._enabled = enabled
        self._seen: set[GraphKey] = set()
        self._graphs: dict[GraphKey, tuple[Recording, Tensor]] = {}
        self._given_up: set[GraphKey] = set()
        self._missed: Counter[GraphKey] = Counter()  # steps that ran eagerly
        self._ahead: tuple[GraphKey, Generator[None]] | None = None  # being captured, in pieces
        # Whether the kernels of a shape are on the device; set by the build, which compiles them ahead.
        self.is_loaded: Callable[[GraphKey], bool] = lambda key: True
        self.replays = 0
        self.eager = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def padded(self, rows: int) -> int:
        """Rows of the graph for a decode batch: the next size whose kernels are loaded, else the next."""
        return self._next(self._sizes, rows, GraphKey)

    def padded_prompts(self, tokens: int, decodes: int) -> GraphKey | None:
        """The shape for a step of `decodes` rows and this many other tokens; None beyond the ladder."""
        if not self._prompts or tokens > self._prompts[-1]:
            return None
        if not decodes:
            size = self._next(self._prompts, tokens, lambda size: GraphKey(0, prompt_tokens=size))
            return GraphKey(0, prompt_tokens=size)
        beside = [size for size in MIXED_DECODES if decodes <= size <= self._sizes[-1]]
        if not beside:
            return None
        mixed = [size for size in MIXED_TOKENS if tokens <= size <= self._most_tokens - beside[0]]
        return GraphKey(beside[0], prompt_tokens=mixed[0]) if mixed else None

    def _next(self, sizes: list[int], least: int, key_of: Callable[[int], GraphKey]) -> int:
        enough = [size for size in sizes if size >= least]
        return next((size for size in enough if self.is_loaded(key_of(size))), enough[0])

    def step(self, key: GraphKey) -> Tensor:
        """The logits of the step in the input buffers."""
        known = self._graphs.get(key)
        if known is None and self._can_capture(key):
            known = self._capture_now(key)
        if known is None:
            if self._ahead is not None and self._ahead[0] == key:
                self._stop_ahead()  # it may be rehearsing: the step's inputs are in the buffers now
            self._seen.add(key)
            self._missed[key] += 1
            self.eager += 1
            return drained(self._run(key))
        graph, logits = known
        graph.replay()
        self.replays += 1
        return logits

    def _can_capture(self, key: GraphKey) -> bool:
        """One graph is captured at a time: another one that is on its way is not waited for."""
        if not self._enabled or key in self._given_up:
            return False
        return key in self._seen and (self._ahead is None or self._ahead[0] == key)

    # ── ahead of their first use ─────────────────────────────────────────────────────────────────────────

    def missing(self) -> list[GraphKey]:
        """Shapes without a graph whose kernels are loaded: those that steps missed, most often first, then
        the rest of the ladder."""
        many = [GraphKey(size) for size in self._sizes if size > FIRST_DECODES]
        return self._left([key for key, _ in self._missed.most_common()] + self._first + many)

    @property
    def misses_first(self) -> bool:
        """Whether a graph that a few users need is missing and could be captured."""
        return self._ahead is not None or bool(self._left(self._first))

    def _left(self, keys: list[GraphKey]) -> list[GraphKey]:
        if not self._enabled:
            return []
        done = self._graphs.keys() | self._given_up
        return [key for key in dict.fromkeys(keys) if key not in done and self.is_loaded(key)]

    def advance(self) -> bool:
        """One small piece of work on the next graph. Returns False if there is nothing to do. Raises what the
        capture raised; that shape then runs eagerly."""
        if self._ahead is None:
            key = next(iter(self.missing()), None)
            if key is None:
                return False
            self._ahead = key, self._pieces(key)
        key, pieces = self._ahead
        try:
            next(pieces)
        except StopIteration:
            self._ahead = None
        except Exception as error:
            self._ahead = None
            self.give_up(key, error)
            raise
        return True

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].close()
            self._ahead = None

    def give_up(self, key: GraphKey, error: Exception) -> None:
        """Run steps of this shape eagerly from now on."""
        self._given_up.add(key)
        log.warning("could not capture a graph for %s; such steps run eagerly: %s", key, error)

    def _pieces(self, key: GraphKey) -> Generator[None]:
        if key not in self._seen:
            yield from self._rehearse(key)
            self._seen.add(key)
        yield from self._capture(key)

    def _capture_now(self, key: GraphKey) -> tuple[Recording, Tensor] | None:
        """All that is left of it: hardly longer than launching the step's kernels one by one."""
        pieces = self._capture(key) if self._ahead is None else self._ahead[1]
        self._ahead = None
        try:
            for _ in pieces:
                pass
        except Exception as error:  # most likely out of memory: a step without a graph is slower, not wrong
            self.give_up(key, error)
            return None
        return self._graphs[key]

    def _capture(self, key: GraphKey) -> Generator[None]:
        recording = self._record()
        layers = self._run(key)
        try:
            logits: Tensor | None = None
            while logits is None:
                with recording.capturing():
                    logits = _next_piece(layers)
                yield
            recording.end()
            yield
            recording.instantiate()
        except BaseException:
            recording.abandon()
            raise
        self._graphs[key] = recording, logits
        log.debug("captured a graph for %s", key)


def _next_piece(layers: Generator[None, None, Tensor]) -> Tensor | None:
    try:
        next(layers)
    except StopIteration as end:
        logits: Tensor = end.value
        return logits
    return None


def drained(layers: Generator[None, None, Tensor]) -> Tensor:
    """What the generator returns, all at once."""
    while (logits := _next_piece(layers)) is None:
        pass
    return logits
