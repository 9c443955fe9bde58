"""Grammars compiled beside the engine: kept, tried out by a process that may die of them, or refused."""

from __future__ import annotations

import json
import random
import threading

import numpy as np
import pytest

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar import compiler as compiling
from ridgeline.engine.grammar.compiler import GrammarCompiler
from ridgeline.engine.grammar.keywords import schema_grammar
from ridgeline.engine.grammar.library import Compiled
from ridgeline.engine.grammar.masks import allowed_tokens, mask_words
from ridgeline.engine.grammar.trial import NO_TIME
from ridgeline.models.spec.read_spec import read_spec
from tests.patience import PATIENCE_S

# Each compiles for ever, or for minutes.
ENDLESS = [
    {"type": "string", "allOf": [{"pattern": f"a.*{i}.*b"} for i in range(30)]},
    {"type": "integer", "multipleOf": 999983},
]
# Thousands of rules, each within the one before: a stack of the usual size does not hold them.
DEEP_RULES = "start: r0\n" + "\n".join(f'r{i}: "x" r{i + 1} | "y"' for i in range(3000)) + '\nr3000: "z"'
DIGITS = Grammar("regex", "[0-9]+")


@pytest.fixture(scope="module")
def tried(smollm2_path) -> GrammarCompiler:
    """As in an engine that serves strangers."""
    spec = read_spec(smollm2_path)
    return GrammarCompiler(smollm2_path, spec.vocab_size, spec.eos_ids, untrusted=True)


@pytest.fixture
def trusting(tried) -> GrammarCompiler:
    compiler = GrammarCompiler(*tried._model)
    compiler._vocabulary = tried._vocabulary  # reading it takes as long as all else here
    return compiler


def test_a_grammar_is_compiled_once(tried):
    first = tried.begin(DIGITS)
    assert first.done.wait(PATIENCE_S)
    assert tried.begin(Grammar("regex", "[0-9]+")) is first
    assert first.result().matcher() is not first.result().matcher()


@pytest.mark.parametrize("schema", ENDLESS)
def test_one_that_compiles_for_ever_is_refused_and_the_next_is_served(tried, schema):
    with pytest.raises(InvalidRequest, match="takes more than"):
        tried.compile(Grammar("json_schema", json.dumps(schema)))
    tried.compile(Grammar("choice", '["still", "here"]'))


HUNGRY = Grammar("lark", "start: A\nA: ~(/(.*a.{40})/ & ~/(.*b.{30})/ & /(.*c.{20})/)")


def follow(compiled: Compiled, vocab: int) -> None:
    """Until the library has enough of it."""
    matcher, draws, mask = compiled.matcher(), random.Random(1), np.zeros(mask_words(vocab), np.int32)
    for _ in range(100):
        reason = matcher.fill(mask, frozenset(), ignores_eos=True)
        if reason is not None:
            raise ValueError(reason)
        tokens = np.flatnonzero(allowed_tokens(mask, vocab))
        matcher.advance(int(tokens[draws.randrange(tokens.size)]))


def test_a_grammar_that_came_to_a_limit_ends_with_an_error_and_is_compiled_anew(trusting):
    vocab = trusting._vocabulary.size
    compiled = trusting.compile(HUNGRY)
    with pytest.raises(ValueError, match="too many states"):
        follow(compiled, vocab)
    anew = trusting.compile(HUNGRY)
    assert anew is not compiled
    mask = np.zeros(mask_words(vocab), np.int32)
    assert anew.matcher().fill(mask, frozenset(), ignores_eos=True) is None
    assert len(trusting._kept) == 1


def test_a_stranger_is_not_served_such_a_grammar(tried):
    with pytest.raises(InvalidRequest, match="cannot be served"):
        tried.compile(HUNGRY)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "format": "int64"},
        {"type": "integer", "format": "int64", "nullable": True},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "maximum": 2**63 - 1},
        {"type": "integer", "exclusiveMinimum": -(10**30)},
        {"type": "number", "minimum": -1e30, "maximum": 1e30},
    ],
)
def test_bounds_beyond_the_librarys_numbers_are_narrowed(trusting, schema):
    compiled = trusting.compile(schema_grammar(schema))

    def is_accepted(text: str) -> bool:
        matcher = compiled.matcher()
        try:
            for token in trusting._vocabulary.tokenizer.greedy_tokenize(text):
                matcher.advance(token)
        except ValueError:
            return False
        return matcher.accepts

    assert all(is_accepted(str(value)) for value in (0, 12, -12, 2**62, -(2**62)))
    assert not any(is_accepted(str(value)) for value in (2**63, -(2**63) - 1, 10**31, -(10**31)))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "minLength": 1, "maxLength": 2**31 - 1}, '"a"'),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2**31 - 1}, "[1, 2]"),
        ({"type": "object", "maxProperties": 2**63 - 1}, '{"a": 1}'),
    ],
)
def test_a_highest_count_that_no_answer_reaches_is_lowered(trusting, schema, text):
    matcher = trusting.compile(schema_grammar(schema)).matcher()
    for token in trusting._vocabulary.tokenizer.greedy_tokenize(text):
        matcher.advance(token)
    assert matcher.accepts
    with pytest.raises(InvalidRequest, match="the limit is 1000000"):
        schema_grammar({"minLength": 2**31 - 1, "minItems": 2**31 - 1})


def test_what_was_refused_is_known_to_be_so(tried):
    bad = Grammar("regex", "(?<!a)b")
    with pytest.raises(InvalidRequest):
        tried.compile(bad)
    assert tried.begin(bad).done.is_set()


def test_a_long_chain_of_rules_harms_nobody(tried):
    tried.compile(Grammar("lark", DEEP_RULES))


def test_what_nobody_waits_for_any_more_is_not_begun(tried, monkeypatch):
    """Otherwise a client that asks and leaves repeatedly would delay all others."""
    all_left, worker = threading.Event(), tried._known_trial().worker
    ask = worker.ask
    monkeypatch.setattr(worker, "ask", lambda task: all_left.wait(PATIENCE_S) and ask(task))
    endless = [{**ENDLESS[0], "minLength": length} for length in range(1, 200)]
    asked = [tried.begin(Grammar("json_schema", json.dumps(schema))) for schema in endless]
    for compilation in asked:
        tried.cancel(compilation)
    all_left.set()
    tried.compile(Grammar("regex", "next"))  # or this would take two minutes
    assert sum(compilation.done.is_set() for compilation in asked) <= 1
    assert not [
        grammar for grammar in tried._kept if "minLength" in grammar.source and grammar != asked[0].grammar
    ]


def test_the_trial_is_begun_anew_when_its_process_is_gone(tried):
    tried.compile(Grammar("regex", "before"))
    tried._trial.worker._process.kill()
    tried.compile(Grammar("regex", "after"))


def test_what_there_was_no_time_to_try_may_be_asked_for_again(tried, monkeypatch):
    late = Grammar("regex", "late")
    monkeypatch.setattr(tried._trial.worker, "ask", lambda question: {"refusal": NO_TIME, "source": ""})
    with pytest.raises(InvalidRequest, match="retry later"):
        tried.compile(late)
    monkeypatch.undo()
    tried.compile(late)


def test_a_converted_grammar_is_served_as_converted(tried):
    matcher = tried.compile(Grammar("lark", 'root ::= "a" | "b"')).matcher()
    assert matcher.advance(tried._vocabulary.tokenizer.tokenize_str("b")[0])


def test_the_oldest_make_room_for_the_newest(trusting, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_KEPT", 3)
    grammars = [Grammar("regex", letter) for letter in "abcd"]
    for grammar in grammars:
        trusting.compile(grammar)
    assert list(trusting._kept) == grammars[1:]
    trusting.compile(grammars[1])
    trusting.compile(grammars[0])
    assert list(trusting._kept) == [grammars[3], grammars[1], grammars[0]]


def test_large_grammars_make_room_by_their_bytes(trusting, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_KEPT_BYTES", 2_200_000)
    large = Grammar("choice", json.dumps(["a" * 20_000, "b"]))
    for grammar in (DIGITS, large, Grammar("regex", "a")):
        trusting.compile(grammar)
    assert DIGITS not in trusting._kept
    assert trusting._kept_bytes <= 2_200_000


def test_a_vocabulary_that_cannot_be_read_refuses_the_grammar_alone(trusting, monkeypatch):
    def broken(*model: object) -> None:
        raise RuntimeError("no such file")

    trusting._vocabulary = None
    monkeypatch.setattr("ridgeline.engine.grammar.library.Vocabulary", broken)
    with pytest.raises(InvalidRequest, match="no such file"):
        trusting.compile(DIGITS)
