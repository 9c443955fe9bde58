"""The grammar library, llguidance: the only module that imports it.

`Vocabulary` holds the model's tokens, `Compiled` a grammar ready to be matched, `Matcher` one sequence's
state in it. Nothing here bounds the time of compiling: `trial` does.
"""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.enforced import ANY_OBJECT
from ridgeline.engine.grammar.masks import Mask, clear_bits, mask_words
from ridgeline.engine.grammar.patterns import WHITESPACE

if TYPE_CHECKING:
    from ridgeline.models.text.tokenizer import Tokenizer

JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "lenient": False}
_BAD_EXPRESSION = re.compile(r"regex parse error:.*?\nerror: ([^\n]+)", re.DOTALL)
# The library recurses along chains of rules; pages are touched only as needed.
COMPILE_STACK_BYTES = 256 << 20
SLOW_MASK_S = 0.1  # CPU seconds: a longer computation for one token delays every request
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 100_000,  # about 7 ms
    "step_max_items": 30_000,  # about 1.5 ms
    "max_lexer_states": 50_000,  # about 100 MB
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class Vocabulary:
    """The model's tokens in the library's form. Making one holds the GIL for 0.1 s."""

    def __init__(self, path: Path, size: int, eos_ids: tuple[int, ...]) -> None:
        from ridgeline.models.text.tokenizer import Tokenizer  # it also imports the chat templates' library

        tokenizer = Tokenizer.load(path)
        self.size = size
        ends = eos_ids or (() if tokenizer.eos_id is None else (tokenizer.eos_id,))
        self.eos_ids = tuple(token for token in ends if token < size)
        if not self.eos_ids:
            raise InvalidRequest("grammar", "cannot be served: this model has no end-of-sequence token")
        spelled = _Spelled(tokenizer, size, self.eos_ids[0])
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(spelled), n_vocab=size, eos_token=list(self.eos_ids)
        )


class _Spelled:
    """A tokenizer with the interface that the library expects."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < size)

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special=False)


class Compiled:
    """A compiled grammar, from which each sequence gets its own matcher.

    spent: one of the matchers reached the library's limits. They share what they computed about the
    language, so all others would fail in the same way: the next request needs a new compilation.
    """

    def __init__(self, vocabulary: Vocabulary, inner: llguidance.LLMatcher) -> None:
        self.eos_ids = vocabulary.eos_ids
        self.spent = False
        self._inner = inner

    def matcher(self) -> Matcher:
        return Matcher(self._inner.deep_copy(), self)


class Matcher:
    """One sequence's state in its grammar."""

    __slots__ = ("_compiled", "_inner")

    def __init__(self, inner: llguidance.LLMatcher, compiled: Compiled) -> None:
        self._inner = inner
        self._compiled = compiled

    def fork(self) -> Matcher:
        """A matcher in the same state that advances on its own."""
        return Matcher(self._inner.deep_copy(), self._compiled)

    def fill(self, mask: Mask, barred: frozenset[int], ignores_eos: bool) -> str | None:
        """Set the bits of the tokens allowed next. Returns the reason if that cannot be determined.

        barred: tokens that are not allowed yet, unless no other token is. An end-of-sequence token is allowed
        where the grammar is complete.
        """
        started = time.thread_time()
        self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if time.thread_time() - started > SLOW_MASK_S:
            return "the grammar is too complex: computing the allowed tokens takes too long"
        if barred or ignores_eos:
            clear_bits(mask, (*barred, *self._compiled.eos_ids) if ignores_eos else tuple(barred))
        if not mask.any():
            return f"the grammar allows no token here{self._error()}"
        return None

    def permits(self, token: int) -> bool:
        """Whether this token is allowed next, without computing all others. Not for end tokens."""
        return bool(self._inner.validate_tokens([token]))

    def advance(self, token: int) -> bool:
        """The token was chosen. True: the grammar is complete and nothing may follow."""
        if not self._inner.consume_token(token):
            raise ValueError(f"the grammar does not allow token {token}{self._error()}")
        if not self._inner.is_stopped():
            return False
        if self._inner.is_error():
            raise ValueError(f"the grammar cannot be matched any further{self._error()}")
        return True

    def _error(self) -> str:
        error = self._inner.get_error()
        if not error:
            return ""
        self._compiled.spent = True
        return f": {readable(error)}"

    @property
    def accepts(self) -> bool:
        """Whether the text so far is complete in the language."""
        return self._inner.is_accepting()


def compile_grammar(vocabulary: Vocabulary, grammar: Grammar) -> Compiled:
    """Raises InvalidRequest if the library rejects the grammar. Mostly runs without the GIL.

    Uses a separate thread, with a stack that a long chain of rules does not exhaust.
    """
    outcome: list[llguidance.LLMatcher | Exception] = []

    def work() -> None:
        try:
            outcome.append(_matcher(vocabulary, grammar))
        except Exception as error:
            outcome.append(error)

    with _stack_lock:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name="grammar-compile", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    (found,) = outcome
    if isinstance(found, Exception):
        raise found
    return Compiled(vocabulary, found)


_stack_lock = threading.Lock()  # the stack size of new threads is a process-wide setting


def _matcher(vocabulary: Vocabulary, grammar: Grammar) -> llguidance.LLMatcher:
    inner = llguidance.LLMatcher(
        vocabulary.tokenizer,
        library_source(grammar),
        log_level=0,
        limits=llguidance.LLParserLimits(**_LIMITS),
    )
    _refuse_error(inner)
    # The extra cost of the first token is paid here, not by a step.
    mask = np.zeros(mask_words(vocabulary.size), np.int32)
    inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    _refuse_error(inner)
    if not mask.any():
        raise InvalidRequest("grammar", "cannot be served: it allows no text at all")
    return inner


def library_source(grammar: Grammar) -> str:
    """The grammar in the library's format."""
    matcher = llguidance.LLMatcher
    match grammar.kind:
        case "json_object":
            return matcher.grammar_from_json_schema(json.dumps(ANY_OBJECT), overrides=JSON_OPTIONS)
        case "json_schema":
            try:
                return matcher.grammar_from_json_schema(grammar.source, overrides=JSON_OPTIONS)
            except ValueError as error:
                raise InvalidRequest("grammar", f"is not a JSON schema: {readable(str(error))}") from None
        case "regex":
            return matcher.grammar_from_regex(grammar.source)
        case "choice":
            return matcher.grammar_from_lark(choice_rule(json.loads(grammar.source)))
        case "lark":
            return matcher.grammar_from_lark(as_lark(grammar.source))


def as_lark(source: str) -> str:
    """GBNF, llama.cpp's notation, is recognised by its ::= and rewritten."""
    if "::=" not in source:
        return source
    try:
        return gbnf_to_lark(source)
    except Exception as error:
        raise InvalidRequest("grammar", f"cannot be served: {readable(str(error))}") from None


def choice_rule(texts: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _refuse_error(inner: llguidance.LLMatcher) -> None:
    error = inner.get_error()
    if error:
        raise InvalidRequest("grammar", f"cannot be served: {readable(error)}")


def readable(error: str) -> str:
    """The library's reason in one line: without its internal state, and shortened."""
    expression = _BAD_EXPRESSION.search(error)
    if expression is not None:
        return f"in a regular expression, {expression[1]}"
    line = " ".join(error.split("<state>")[0].replace("<non-verbose/>", "").split())
    if line.startswith("NoExtension"):
        return "it allows no text at all"
    return line if len(line) <= 300 else line[:300] + " …"
