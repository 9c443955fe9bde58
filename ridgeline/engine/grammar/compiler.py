"""GrammarCompiler: compiles each Grammar once, in parallel with the engine's steps.

One worker thread compiles in request order; the library releases the GIL meanwhile. With `untrusted`, each
grammar is first compiled in a child process, which it may crash (`trial`). Recent results are cached: the
compiled grammars, and the reasons of rejected ones. The engine's core starts compilations and never waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar, Untried

if TYPE_CHECKING:
    from ridgeline.engine.grammar.library import Compiled, Vocabulary
    from ridgeline.engine.grammar.trial import Trial

log = logging.getLogger(__name__)

MAX_KEPT = 256
MAX_KEPT_BYTES = 128 << 20
_NICENESS = 10  # running steps have priority over compiling


class Compilation:
    """The compilation of one grammar. `outcome` is set when it is done.

    waiters: requests that wait for it; without any, it is not started.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.waiters = 0
        self.outcome: Compiled | InvalidRequest | None = None
        self.done = threading.Event()

    @property
    def spent(self) -> bool:
        return not (self.outcome is None or isinstance(self.outcome, InvalidRequest)) and self.outcome.spent

    def result(self) -> Compiled:
        """The result of a finished compilation. Raises InvalidRequest if the grammar cannot be served."""
        if isinstance(self.outcome, InvalidRequest):
            raise InvalidRequest(self.outcome.field, self.outcome.message)
        assert self.outcome is not None
        return self.outcome


class GrammarCompiler:
    def __init__(
        self, path: Path, vocab_size: int, eos_ids: tuple[int, ...], untrusted: bool = False
    ) -> None:
        """untrusted: grammars may come from clients that send one that never finishes compiling."""
        self.on_done: Callable[[], None] = lambda: None  # called by the worker when a compilation is done
        self._model = path, vocab_size, eos_ids
        self._untrusted = untrusted
        self._vocabulary: Vocabulary | None = None
        self._trial: Trial | None = None
        self._lock = threading.Lock()  # guards the cache
        self._kept: OrderedDict[Grammar, Compilation] = OrderedDict()
        self._kept_bytes = 0
        self._asked: queue.SimpleQueue[Compilation] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def begin(self, grammar: Grammar) -> Compilation:
        """Start compiling; a cached grammar is done at once. A caller that stops waiting calls `cancel`."""
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None and not known.spent:
                self._kept.move_to_end(grammar)
                known.waiters += 1
                return known
            self._kept_bytes += _bytes_of(grammar) if known is None else 0
            compilation = self._kept[grammar] = Compilation(grammar)
            compilation.waiters = 1
            self._kept.move_to_end(grammar)
            self._evict()
        self._start_worker()
        self._asked.put(compilation)
        return compilation

    def cancel(self, compilation: Compilation) -> None:
        """One of the callers no longer waits for it."""
        with self._lock:
            compilation.waiters -= 1

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile and wait. Raises InvalidRequest if it cannot be served."""
        compilation = self.begin(grammar)
        compilation.done.wait()
        return compilation.result()

    def _evict(self) -> None:
        """Evict the least recently used, but not the newest, and none that is still to be compiled."""
        for grammar, kept in list(self._kept.items())[:-1]:
            if len(self._kept) <= MAX_KEPT and self._kept_bytes <= MAX_KEPT_BYTES:
                return
            if kept.done.is_set():
                del self._kept[grammar]
                self._kept_bytes -= _bytes_of(grammar)

    # ---- the worker ----

    def _start_worker(self) -> None:
        with self._lock:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="grammar-compiler", daemon=True)
                self._worker.start()

    def _work(self) -> None:
        self._prepare()
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            compilation = self._asked.get()
            if self._is_cancelled(compilation):
                continue
            compilation.outcome = self._outcome(compilation.grammar)
            if isinstance(compilation.outcome, Untried):
                with self._lock:
                    self._discard(compilation)
            compilation.done.set()
            self.on_done()

    def _prepare(self) -> None:
        """Prepare the first grammar before this thread lowers its priority: start the trial's process and
        load the vocabulary, in parallel. Errors are reported to the requests that need a grammar.
        """
        with contextlib.suppress(Exception):
            if self._untrusted:
                self._known_trial().worker.start()
            self._known_vocabulary()

    def _is_cancelled(self, compilation: Compilation) -> bool:
        """Whether all callers cancelled before it started. It is then discarded."""
        with self._lock:
            if compilation.waiters > 0:
                return False
            self._discard(compilation)
            return True

    def _discard(self, compilation: Compilation) -> None:
        """Under the lock, so that no caller finds it at the same moment."""
        if self._kept.get(compilation.grammar) is compilation:
            del self._kept[compilation.grammar]
            self._kept_bytes -= _bytes_of(compilation.grammar)

    def _outcome(self, grammar: Grammar) -> Compiled | InvalidRequest:
        try:
            vocabulary = self._known_vocabulary()
            if self._untrusted:
                grammar = self._known_trial().checked(grammar)
            from ridgeline.engine.grammar.library import compile_grammar

            return compile_grammar(vocabulary, grammar)
        except InvalidRequest as refusal:
            return refusal
        except Exception as error:
            log.exception("could not compile a grammar")
            return InvalidRequest("grammar", f"could not be compiled: {type(error).__name__}: {error}")

    def _known_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            try:
                from ridgeline.engine.grammar.library import Vocabulary
            except ImportError as error:
                raise InvalidRequest(
                    "grammar", f"cannot be served: the package {error.name} is not installed"
                ) from error
            self._vocabulary = Vocabulary(*self._model)
        return self._vocabulary

    def _known_trial(self) -> Trial:
        from ridgeline.engine.grammar.trial import Trial

        if self._trial is None:
            self._trial = Trial(*self._model)
        return self._trial


def _bytes_of(grammar: Grammar) -> int:
    """Approximate size when compiled, measured on schemas of 1 to 100 kB."""
    return (128 << 10) + 100 * len(grammar.source)
