"""GrammarCompiler: from a Grammar to what matches it, beside the engine's steps, once for each grammar.

One worker thread compiles, in the order of asking; the library leaves Python's lock free meanwhile. With
`tries`, each grammar is first compiled in a process that may die of it (`trial`). What came of the last ones
is kept: the compiled, and the reasons of those that were refused. The engine's core asks, and never waits.
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
_NICENESS = 10  # the steps of those who already have an answer under way come first


class Compilation:
    """What will become of a grammar. `outcome` is there when it is done.

    waiters: requests that asked for it and have not given up; without any it is not begun.
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
        """Of one that is done. Raises InvalidRequest where the grammar cannot be served."""
        if isinstance(self.outcome, InvalidRequest):
            raise InvalidRequest(self.outcome.field, self.outcome.message)
        assert self.outcome is not None
        return self.outcome


class GrammarCompiler:
    def __init__(self, path: Path, vocab_size: int, eos_ids: tuple[int, ...], tries: bool = False) -> None:
        """tries: for grammars of strangers, who may know one that compiles for ever."""
        self.on_done: Callable[[], None] = lambda: None  # called by the worker when a compilation is done
        self._model = path, vocab_size, eos_ids
        self._tries = tries
        self._vocabulary: Vocabulary | None = None
        self._trial: Trial | None = None
        self._lock = threading.Lock()  # of what is kept
        self._kept: OrderedDict[Grammar, Compilation] = OrderedDict()
        self._kept_bytes = 0
        self._asked: queue.SimpleQueue[Compilation] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def begin(self, grammar: Grammar) -> Compilation:
        """Have it compiled; what is known already is done at once. Whoever stops waiting gives it up."""
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

    def give_up(self, compilation: Compilation) -> None:
        """One of those who asked for it does not wait any more."""
        with self._lock:
            compilation.waiters -= 1

    def compile(self, grammar: Grammar) -> Compiled:
        """Wait for it. Raises InvalidRequest where it cannot be served."""
        compilation = self.begin(grammar)
        compilation.done.wait()
        return compilation.result()

    def _evict(self) -> None:
        """Those asked for longest ago, but not the newest, and none that is still to be compiled."""
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
            if self._is_unwanted(compilation):
                continue
            compilation.outcome = self._outcome(compilation.grammar)
            if isinstance(compilation.outcome, Untried):
                with self._lock:
                    self._forget(compilation)
            compilation.done.set()
            self.on_done()

    def _prepare(self) -> None:
        """What the first grammar waits for, before this thread gives way to the steps: the trial's process
        and the vocabulary here, side by side. Who asks for a grammar is told what went wrong.
        """
        with contextlib.suppress(Exception):
            if self._tries:
                self._known_trial().questions.start()
            self._known_vocabulary()

    def _is_unwanted(self, compilation: Compilation) -> bool:
        """Everybody gave up before it was begun: then it is forgotten."""
        with self._lock:
            if compilation.waiters > 0:
                return False
            self._forget(compilation)
            return True

    def _forget(self, compilation: Compilation) -> None:
        """Under the lock: nobody may find it in the same moment."""
        if self._kept.get(compilation.grammar) is compilation:
            del self._kept[compilation.grammar]
            self._kept_bytes -= _bytes_of(compilation.grammar)

    def _outcome(self, grammar: Grammar) -> Compiled | InvalidRequest:
        try:
            vocabulary = self._known_vocabulary()
            if self._tries:
                grammar = self._known_trial().survived(grammar)
            from ridgeline.engine.grammar.library import compile_grammar

            return compile_grammar(vocabulary, grammar)
        except InvalidRequest as refusal:
            return refusal
        except Exception as error:
            log.exception("a grammar could not be compiled")
            return InvalidRequest("grammar", f"could not be compiled: {type(error).__name__}: {error}")

    def _known_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            try:
                from ridgeline.engine.grammar.library import Vocabulary
            except ImportError as error:
                raise InvalidRequest(
                    "grammar", f"cannot be served: the package {error.name} is not installed here"
                ) from error
            self._vocabulary = Vocabulary(*self._model)
        return self._vocabulary

    def _known_trial(self) -> Trial:
        from ridgeline.engine.grammar.trial import Trial

        if self._trial is None:
            self._trial = Trial(*self._model)
        return self._trial


def _bytes_of(grammar: Grammar) -> int:
    """What it takes about, compiled: measured on schemas of 1 to 100 kB."""
    return (128 << 10) + 100 * len(grammar.source)
