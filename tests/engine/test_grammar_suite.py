"""Schemas of the JSON Schema test suite: what is accepted is enforced, what cannot be is refused by name."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.conformance import fault
from ridgeline.engine.grammar.keywords import schema_grammar
from ridgeline.engine.grammar.library import Compiled, Vocabulary, compile_grammar
from ridgeline.engine.grammar.masks import allowed_tokens, mask_words
from ridgeline.models.spec.read_spec import read_spec

VALIDATORS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}
WALK_TOKENS = 60
# Of every draft's schemas, those that are refused: a keyword that stops being enforced would change it.
LEAST_ACCEPTED = {"draft2020-12": 170, "draft2019-09": 170, "draft7": 170, "draft6": 140, "draft4": 130}


@dataclass(frozen=True)
class Case:
    name: str
    schema: Any
    tests: list[dict[str, Any]]
    compiled: Compiled | None  # None: refused
    grammar: Grammar | None


@pytest.fixture(scope="module")
def vocabulary(smollm2_path) -> Vocabulary:
    spec = read_spec(smollm2_path)
    return Vocabulary(smollm2_path, spec.vocab_size, spec.eos_ids)


@pytest.fixture(scope="module")
def suite(shared_data, vocabulary) -> dict[str, list[Case]]:
    root = shared_data / "json-schema-test-suite" / "tests"
    return {draft: list(cases_of(root / draft, vocabulary)) for draft in VALIDATORS}


def cases_of(folder: Path, vocabulary: Vocabulary) -> Iterator[Case]:
    for path in sorted(folder.rglob("*.json")):
        for case in json.loads(path.read_text()):
            compiled = grammar = None
            with contextlib.suppress(InvalidRequest):
                grammar = schema_grammar(case["schema"])
                compiled = compile_grammar(vocabulary, grammar)
            name = f"{path.relative_to(folder)}: {case['description']}"
            yield Case(name, case["schema"], case["tests"], compiled, grammar)


def passes(grammar: Grammar, text: str) -> bool:
    """What the check of a finished answer says, in this process: the schemas are not hostile."""
    return not grammar.check or not fault([grammar.check, text])


def accepts(vocabulary: Vocabulary, compiled: Compiled, text: str) -> bool:
    matcher = compiled.matcher()
    try:
        for token in vocabulary.tokenizer.greedy_tokenize(text):
            matcher.advance(token)
    except ValueError:
        return False
    return matcher.accepts


def walk(vocabulary: Vocabulary, compiled: Compiled, draws: random.Random) -> str | None:
    """A random text of the language that tends to end soon."""
    matcher = compiled.matcher()
    mask = np.zeros(mask_words(vocabulary.size), np.int32)
    tokens: list[int] = []
    ends = set(vocabulary.eos_ids)
    for _ in range(WALK_TOKENS):
        assert matcher.fill(mask, frozenset(), ignores_eos=False) is None
        allowed = np.flatnonzero(allowed_tokens(mask, vocabulary.size))
        if ends & set(allowed[:64].tolist()) and draws.random() < 0.7:
            return decoded(vocabulary, tokens)
        short = allowed[allowed < 400]  # letters and signs: they close what is open
        among = short if short.size and draws.random() < 0.8 else allowed
        token = int(among[draws.randrange(among.size)])
        if token in ends:
            return decoded(vocabulary, tokens)
        tokens.append(token)
        if matcher.advance(token):
            return decoded(vocabulary, tokens)
    return None


def decoded(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return vocabulary.tokenizer.decode_bytes(tokens).decode()


@pytest.mark.parametrize("draft", VALIDATORS)
def test_no_instance_that_is_invalid_is_accepted(suite, vocabulary, draft):
    accepted = [case for case in suite[draft] if case.compiled is not None]
    wrong = [
        (case.name, test["data"])
        for case in accepted
        for test in case.tests
        if not test["valid"]
        and accepts(vocabulary, case.compiled, text := json.dumps(test["data"], ensure_ascii=False))
        and passes(case.grammar, text)
    ]
    assert wrong == []
    assert len(accepted) >= LEAST_ACCEPTED[draft]


@pytest.mark.parametrize("draft", VALIDATORS)
def test_nearly_every_instance_that_is_valid_is_accepted(suite, vocabulary, draft):
    """Only other spellings are rejected: 1.0 for 1, the members of an object in another order."""
    outcome = Counter(
        accepts(vocabulary, case.compiled, json.dumps(test["data"], ensure_ascii=False))
        for case in suite[draft]
        for test in case.tests
        if case.compiled is not None and test["valid"]
    )
    assert outcome[True] > 0.9 * outcome.total()


@pytest.mark.parametrize("draft", VALIDATORS)
def test_whatever_is_written_under_an_accepted_schema_validates(suite, vocabulary, draft):
    validator = VALIDATORS[draft]
    draws = random.Random(draft)
    finished = 0
    for case in suite[draft]:
        if case.compiled is None:
            continue
        for _ in range(2):
            text = walk(vocabulary, case.compiled, draws)
            if text is None:
                continue
            finished += 1
            if not passes(case.grammar, text):
                continue
            try:
                errors = list(validator(case.schema).iter_errors(json.loads(text)))
            except re.error:
                continue  # an expression that Python cannot read
            assert errors == [], (case.name, text)
    assert finished > 100
