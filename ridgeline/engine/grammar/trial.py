"""Trial: a grammar is compiled and walked through for a while by a process that may die of it.

The library bounds most of what a grammar can cost, but not all: a schema of a kilobyte can compile for ever,
and a long chain of rules overflows a stack. So `python -m ridgeline.engine.grammar.trial` forks a child for
each grammar, with limits on its processor time and memory, and says what became of it. `Trial` is the
compiler's end of it.
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
from ridgeline.engine.grammar.forked import NO_TIME, TOO_LARGE, TOO_LONG, Questions, serve_questions
from ridgeline.engine.grammar.masks import allowed_tokens, mask_words

if TYPE_CHECKING:
    from ridgeline.engine.grammar.library import Compiled, Vocabulary

CPU_LIMIT_S = 0.6  # of one grammar, compiled and walked through
MASK_LIMIT_S = 0.05  # of processor time for one token
WALKS, WALK_TOKENS = 2, 24
DIED = {
    TOO_LONG: f"cannot be served: it takes more than {CPU_LIMIT_S:g} s to compile",
    TOO_LARGE: "cannot be served: it is too deep or too large to compile",
    NO_TIME: NO_TIME,
}
TOO_SLOW = f"cannot be served: finding its next token takes more than {1000 * MASK_LIMIT_S:g} ms"


class Answer(TypedDict):
    """What became of a grammar: why not to serve it, or how to write it."""

    refusal: str
    source: str


class Trial:
    def __init__(self, path: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        arguments = [str(path), str(vocab_size), ",".join(map(str, eos_ids))]
        self.questions = Questions("ridgeline.engine.grammar.trial", arguments)

    def survived(self, grammar: Grammar) -> Grammar:
        """The grammar, in the notation that takes the engine the least to read.

        Raises InvalidRequest for one that the library refuses, or dies of, or takes too long for.
        """
        answer: Answer | None = self.questions.ask([grammar.kind, grammar.source])
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

    def tried(question: Any) -> Answer:
        return _tried(vocabulary, Grammar(*question))

    serve_questions(tried, CPU_LIMIT_S, lambda reason: Answer(refusal=DIED[reason], source=""))


def _tried(vocabulary: Vocabulary, grammar: Grammar) -> Answer:
    from ridgeline.engine.grammar.library import as_lark, compile_grammar

    try:
        if grammar.kind == "lark":
            grammar = replace(grammar, source=as_lark(grammar.source))
        compiled = compile_grammar(vocabulary, grammar)
    except InvalidRequest as refusal:
        return Answer(refusal=refusal.message, source="")
    outcome: list[str] = []
    # With the stack of the thread that steps, or a smaller one: what overflows there overflows here.
    thread = threading.Thread(target=lambda: outcome.append(_walked(compiled, vocabulary.size)))
    thread.start()
    thread.join()
    reason = outcome[0] if outcome else "cannot be served: it cannot be matched"
    return Answer(refusal=reason, source=grammar.source)


def _walked(compiled: Compiled, vocab_size: int) -> str:
    """Texts of the language at random, as far as a few tokens go: no token may take long to find."""
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
