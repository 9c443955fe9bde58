"""Trial: compiles a grammar and generates from it for a while, in a process that it may crash.

The library bounds most of a grammar's cost, but not all: a schema of a kilobyte can compile forever, and a
long chain of rules overflows a stack. So `python -m ridgeline.engine.grammar.trial` forks a child for each
grammar, with limits on its CPU time and memory, and reports the result. `Trial` is the compiler's side.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar, Untried
from ridgeline.engine.grammar.forked import NO_TIME, TOO_LARGE, TOO_LONG, ForkedWorker, serve_forked
from ridgeline.engine.grammar.masks import allowed_tokens, mask_words

if TYPE_CHECKING:
    from ridgeline.engine.grammar.library import Compiled, Vocabulary

CPU_LIMIT_S = 0.6  # CPU seconds for one grammar: compiling and generating
MASK_LIMIT_S = 0.05  # CPU seconds for one token
WALKS, WALK_TOKENS = 2, 24
DIED = {
    TOO_LONG: f"cannot be served: it takes more than {CPU_LIMIT_S:g} s to compile",
    TOO_LARGE: "cannot be served: it is too deep or too large to compile",
    NO_TIME: NO_TIME,
}
TOO_SLOW = f"cannot be served: finding its next token takes more than {1000 * MASK_LIMIT_S:g} ms"


class TrialResult(TypedDict):
    """The result of a trial: why the grammar is rejected, or its source in another notation."""

    refusal: str
    source: str


class Trial:
    def __init__(self, path: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        arguments = [str(path), str(vocab_size), ",".join(map(str, eos_ids))]
        self.worker = ForkedWorker("ridgeline.engine.grammar.trial", arguments)

    def checked(self, grammar: Grammar) -> Grammar:
        """The grammar, in the notation that is cheapest for the engine to read.

        Raises InvalidRequest for one that the library rejects, crashes on, or takes too long for.
        """
        answer: TrialResult | None = self.worker.ask([grammar.kind, grammar.source])
        if answer is None or answer["refusal"] == NO_TIME:
            raise Untried
        if answer["refusal"]:
            raise InvalidRequest("grammar", answer["refusal"])
        return replace(grammar, source=answer["source"])


# ---- the process ----


def main() -> None:
    from ridgeline.engine.grammar.library import Vocabulary

    path, size, ends = sys.argv[1:]
    vocabulary = Vocabulary(Path(path), int(size), tuple(int(token) for token in ends.split(",") if token))

    def tried(question: Any) -> TrialResult:
        return _tried(vocabulary, Grammar(*question))

    serve_forked(tried, CPU_LIMIT_S, lambda reason: TrialResult(refusal=DIED[reason], source=""))


def _tried(vocabulary: Vocabulary, grammar: Grammar) -> TrialResult:
    from ridgeline.engine.grammar.library import as_lark, compile_grammar

    try:
        if grammar.kind == "lark":
            grammar = replace(grammar, source=as_lark(grammar.source))
        compiled = compile_grammar(vocabulary, grammar)
    except InvalidRequest as refusal:
        return TrialResult(refusal=refusal.message, source="")
    outcome: list[str] = []
    # With at most the stack of the thread that steps: what overflows there overflows here.
    thread = threading.Thread(target=lambda: outcome.append(_walked(compiled, vocabulary.size)))
    thread.start()
    thread.join()
    reason = outcome[0] if outcome else "cannot be served: it cannot be matched"
    return TrialResult(refusal=reason, source=grammar.source)


def _walked(compiled: Compiled, vocab_size: int) -> str:
    """Generate random texts of a few tokens: no token may take long to compute."""
    mask = np.zeros(mask_words(vocab_size), np.int32)
    draws = random.Random(0)
    for _ in range(WALKS):
        matcher = compiled.matcher()
        for _ in range(WALK_TOKENS):
            started = time.thread_time()
            reason = matcher.fill(mask, frozenset(), ignores_eos=True)
            if reason is not None:
                return f"cannot be served: {reason}"
            if time.thread_time() - started > MASK_LIMIT_S:
                return TOO_SLOW
            tokens = np.flatnonzero(allowed_tokens(mask, vocab_size))
            try:
                if matcher.advance(int(tokens[draws.randrange(tokens.size)])):
                    break
            except ValueError as error:
                return f"cannot be served: {error}"
    return ""


if __name__ == "__main__":
    main()
