"""Trial: a grammar is compiled and walked through for a while by a process that may die of it.

The library bounds most of what a grammar can cost, but not all: a schema of a kilobyte can compile for ever,
and a long chain of rules overflows a stack. So `python -m ridgeline.engine.grammar.trial` forks a child for
each grammar, with limits on its processor time and memory, and says what became of it. `Trial` is the
compiler's end of it; it starts the process when the first grammar comes, and again should it be gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypedDict

import numpy as np

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar, Untried
from ridgeline.engine.grammar.masks import allowed_tokens, mask_words

if TYPE_CHECKING:
    from ridgeline.engine.grammar.library import Compiled, Vocabulary

CPU_LIMIT_S = 0.6  # of one grammar, compiled and walked through
WALL_LIMIT_S = 5.0  # the same on a machine that has hardly a processor to spare
MEMORY_LIMIT_BYTES = 1 << 30  # beyond what the process has before
MASK_LIMIT_S = 0.05  # of processor time for one token
WALKS, WALK_TOKENS = 2, 24
START_LIMIT_S = 60.0
_NICENESS = 10
TOO_LONG = f"cannot be served: it takes more than {CPU_LIMIT_S:g} s to compile"
NO_TIME = "no time"
TOO_LARGE = "cannot be served: it is too deep or too large to compile"
TOO_SLOW = f"cannot be served: finding its next token takes more than {1000 * MASK_LIMIT_S:g} ms"


class Answer(TypedDict):
    """What became of a grammar: why not to serve it, or how to write it."""

    refusal: str
    source: str


class Trial:
    """One process, asked by one thread."""

    def __init__(self, path: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._arguments = [str(path), str(vocab_size), ",".join(map(str, eos_ids))]
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered = False

    def survived(self, grammar: Grammar) -> Grammar:
        """The grammar, in the notation that takes the engine the least to read.

        Raises InvalidRequest for one that the library refuses, or dies of, or takes too long for.
        """
        question = json.dumps([grammar.kind, grammar.source]).encode() + b"\n"
        for _ in range(2):
            answer = self._ask(question)
            if answer is None:
                self.close()  # and once more, in a new one
            elif answer["refusal"] == NO_TIME:
                raise Untried
            elif answer["refusal"]:
                raise InvalidRequest("grammar", answer["refusal"])
            else:
                return replace(grammar, source=answer["source"])
        raise Untried

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._has_answered = False

    def _ask(self, question: bytes) -> Answer | None:
        """None where the process does not answer."""
        patience_s = WALL_LIMIT_S + 2.0
        if not self._has_answered:
            patience_s += START_LIMIT_S
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(question)
            process.stdin.flush()
            if not select.select([process.stdout], [], [], patience_s)[0]:
                return None
            line = process.stdout.readline()
        except OSError:
            return None
        if not line:
            return None
        self._has_answered = True
        answer: Answer = json.loads(line)
        return answer

    def start(self) -> subprocess.Popen[bytes]:
        """The process, begun if there is none; it takes questions before it has read the vocabulary."""
        if self._process is None:
            self._has_answered = False
            self._process = self._begun()
        return self._process

    def _begun(self) -> subprocess.Popen[bytes]:
        # The very package that runs here, wherever it was imported from.
        paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CUDA_VISIBLE_DEVICES": "",
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "ridgeline.engine.grammar.trial", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is the front's affair
        )


# ---- the process ----


def main() -> None:
    from ridgeline.engine.grammar.library import Vocabulary

    path, size, ends = sys.argv[1:]
    vocabulary = Vocabulary(Path(path), int(size), tuple(int(token) for token in ends.split(",") if token))
    os.nice(_NICENESS)  # from here on: the first grammar waits for all before
    for line in sys.stdin.buffer:  # until whoever asks is gone
        kind, source = json.loads(line)
        answer = _answer_of_child(vocabulary, Grammar(kind, source))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answer_of_child(vocabulary: Vocabulary, grammar: Grammar) -> Answer:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(vocabulary, grammar, writing)
    os.close(writing)
    said = b""
    deadline = time.monotonic() + WALL_LIMIT_S
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 65536)
        if not part:
            break
        said += part
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if said.endswith(b"\n"):
        answer: Answer = json.loads(said)
        return answer
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    reasons = {int(signal.SIGPROF): TOO_LONG, int(signal.SIGKILL): NO_TIME}
    reason = reasons.get(ended_by, TOO_LARGE)
    return Answer(refusal=reason, source="")


def _be_the_child(vocabulary: Vocabulary, grammar: Grammar, writing: int) -> NoReturn:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_LIMIT_BYTES,) * 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        answer = _tried(vocabulary, grammar)
        os.write(writing, json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


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
