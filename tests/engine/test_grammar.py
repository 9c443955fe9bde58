"""Answers under grammars, from the real model: alone and in company, whole and in pieces, with all else."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from ridgeline import SamplingParams
from ridgeline.engine.errors import InvalidRequest, SchemaViolation
from ridgeline.engine.grammar import MAX_SOURCE_BYTES, Grammar
from ridgeline.engine.grammar.keywords import schema_grammar
from ridgeline.engine.grammar.library import Matcher
from ridgeline.engine.schedule.request import FinishReason

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = schema_grammar(PERSON)
DIGITS = Grammar("regex", "[0-9]{3}-[0-9]{4}")


@pytest.fixture(scope="module")
def prompt(llm) -> list[int]:
    return llm.tokenizer.encode_chat([{"role": "user", "content": "Describe a person as JSON."}])


def params(**options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 120, "grammar": SCHEMA, **options})


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.2},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
    ],
    ids=["greedy", "warm", "nucleus", "top-k"],
)
def test_every_sample_follows_the_schema(llm, prompt, sampling):
    generation = llm.generate([prompt], params(n=3, seed=11, **sampling))[0]
    for completion in generation.completions:
        assert completion.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(completion.text), PERSON)
    if sampling["temperature"]:
        assert len({completion.text for completion in generation.completions}) > 1


def test_asking_for_the_best_token_alone_changes_nothing(llm, prompt, monkeypatch):
    """Nearly every greedy token is found without a mask: with masks for all, the answers are the same."""
    asked = [params(max_tokens=40, min_tokens=minimum) for minimum in (0, 30)]
    quick = [generation.text for generation in llm.generate([prompt, prompt], asked)]
    monkeypatch.setattr(Matcher, "permits", lambda self, token: False)
    assert [generation.text for generation in llm.generate([prompt, prompt], asked)] == quick


def test_any_json_object_is_one(llm):
    examples = llm.tokenizer.encode('{"a": 1}\n{"b": 2}\n{"c": 3}\n')
    text = llm.generate([examples], params(grammar=Grammar("json_object"), max_tokens=60))[0].text
    assert isinstance(json.loads(text), dict)


def test_a_choice_is_one_of_its_texts_and_ends_at_once(llm, prompt):
    texts = ['he said "no"\n', "yes", "perhaps, perhaps not"]
    (completion,) = llm.generate([prompt], params(grammar=Grammar("choice", json.dumps(texts))))[
        0
    ].completions
    assert completion.text in texts
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason is None  # no end-of-sequence token was needed: nothing else could follow


def test_a_text_that_may_go_on_ends_with_the_end_of_sequence_token(llm, prompt):
    hello = Grammar("lark", 'start: "Hello " NAME\nNAME: /[a-z]+/')
    (completion,) = llm.generate([prompt], params(grammar=hello))[0].completions
    assert re.fullmatch("Hello [a-z]+", completion.text)
    assert completion.stop_reason in llm.engine.spec.eos_ids


def test_a_lark_grammar_may_embed_a_schema(llm, prompt):
    source = f'start: "Person: " person\nperson: %json {json.dumps(PERSON)}'
    text = llm.generate([prompt], params(grammar=Grammar("lark", source)))[0].text
    assert text.startswith("Person: ")
    jsonschema.validate(json.loads(text.removeprefix("Person: ")), PERSON)


def test_a_gbnf_grammar_is_understood(llm, prompt):
    text = llm.generate([prompt], params(grammar=Grammar("lark", 'root ::= "Age " [0-9]+ "."')))[0].text
    assert re.fullmatch(r"Age [0-9]+\.", text)


def test_constrained_and_free_answers_in_one_batch_are_those_given_alone(llm, prompt):
    other = llm.tokenizer.encode("The capital of France is")
    work = [
        (prompt, params()),
        (other, params(grammar=None, max_tokens=30)),
        (other, params(grammar=DIGITS)),
        (prompt, params(seed=5, temperature=1.0)),
        (other, params(grammar=None, max_tokens=30, temperature=1.0, seed=6)),
    ]
    together = llm.generate([ids for ids, _ in work], [asked for _, asked in work])
    alone = [llm.generate([ids], asked)[0] for ids, asked in work]
    assert [g.completions[0].tokens for g in together] == [g.completions[0].tokens for g in alone]


def test_the_stream_joined_is_the_whole(llm, prompt):
    chunks = list(llm.generate_stream(prompt, params()))
    assert "".join(chunk.text for chunk in chunks) == llm.generate([prompt], params())[0].text
    assert len(chunks) > 5


def test_an_answer_is_the_same_with_its_prompt_in_the_cache(llm):
    text = "Read this list of people carefully. " * 30 + "Describe one of them as JSON:"
    ids = llm.tokenizer.encode(text)
    llm.engine.core.scheduler.reset_prefix_cache()
    first = llm.generate([ids], params())[0].completions[0]
    second = llm.generate([ids], params())[0].completions[0]
    assert first.timing.cached_tokens == 0 < second.timing.cached_tokens
    assert first.tokens == second.tokens


def test_a_preempted_answer_goes_on_where_it_was(llm, driver, prompt):
    asked = [params(seed=i, temperature=1.0) for i in range(4)]
    expected = llm.generate([prompt] * 4, asked)
    tight = driver(num_blocks=8, prefix_cache=False)
    for _ in range(64):
        tight.core.scheduler.output_lengths.record(1)  # so that it admits more than will fit
    tight.core.grammars = llm.engine.core.grammars  # where the schema is compiled by now
    outcomes = tight.run([(prompt, one) for one in asked])
    assert tight.core.stats().preemptions > 0
    assert [outcome.tokens for (outcome,) in outcomes] == [g.completions[0].tokens for g in expected]


def test_log_probabilities_are_the_models_own(llm, prompt):
    free = llm.generate([prompt], params(grammar=None, max_tokens=1, logprobs=5))[0].completions[0]
    bound = llm.generate([prompt], params(grammar=DIGITS, max_tokens=1, logprobs=5))[0].completions[0]
    assert bound.tokens != free.tokens
    assert bound.logprobs[0].top == free.logprobs[0].top  # of all tokens, whatever the grammar says
    assert bound.logprobs[0].rank > 1
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


def test_stop_strings_end_a_constrained_answer_too(llm, prompt):
    (completion,) = llm.generate([prompt], params(stop=('"age"',)))[0].completions
    assert completion.stop_reason == '"age"'
    assert completion.text.startswith("{")
    assert '"age"' not in completion.text


def test_max_tokens_cuts_it_short(llm, prompt):
    (completion,) = llm.generate([prompt], params(max_tokens=4))[0].completions
    assert completion.finish_reason is FinishReason.LENGTH


def test_bias_cannot_bring_in_what_the_grammar_bars(llm, prompt):
    barred = llm.tokenizer.encode("x")[0]
    text = llm.generate([prompt], params(grammar=DIGITS, logit_bias={barred: 100.0}))[0].text
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", text)


def test_min_tokens_is_kept_as_far_as_the_grammar_lets_it(llm, prompt):
    letters = Grammar("regex", "[a-z]+")
    (longer,) = llm.generate([prompt], params(grammar=letters, min_tokens=25))[0].completions
    assert len(longer.tokens) >= 25
    (short,) = llm.generate([prompt], params(grammar=Grammar("choice", '["yes"]'), min_tokens=25))[
        0
    ].completions
    assert short.text == "yes"
    assert short.finish_reason is FinishReason.STOP


def test_an_ignored_end_of_sequence_comes_only_where_nothing_else_can(llm, prompt):
    asked = params(grammar=Grammar("regex", "a{1,12}"), ignore_eos=True)
    (completion,) = llm.generate([prompt], asked)[0].completions
    assert completion.text == "a" * 12
    assert completion.finish_reason is FinishReason.STOP


def test_what_cannot_be_served_is_refused_before_anything_is_computed(llm, prompt):
    steps = llm.engine.core.scheduler.counters.steps
    bad = Grammar("json_schema", '{"properties": {"a": {"anyOf": [{"extends": {}}]}}}')
    with pytest.raises(InvalidRequest, match="'extends' is not supported") as caught:
        llm.generate([prompt, prompt], [params(), params(grammar=bad)])
    assert caught.value.field == "grammar.properties.a.anyOf[0].extends"
    assert llm.engine.core.scheduler.counters.steps == steps


def test_an_answer_that_breaks_a_checked_keyword_ends_with_an_error(llm, prompt):
    """The grammar writes the array's one value twice; only the finished answer shows that they are equal."""
    twice = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    grammar = schema_grammar(twice)
    assert grammar.checked == ("uniqueItems",)
    (completion,) = llm.generate([prompt], params(grammar=grammar))[0].completions
    assert completion.finish_reason is FinishReason.ERROR
    assert "uniqueItems" in completion.error
    with pytest.raises(SchemaViolation, match="does not match its schema"):
        list(llm.generate_stream(prompt, params(grammar=grammar)))
    once = schema_grammar({**twice, "minItems": 1, "maxItems": 1})
    assert llm.generate([prompt], params(grammar=once))[0].completions[0].finish_reason is FinishReason.STOP


def test_numbers_and_objects_come_to_an_end(llm):
    """A model that repeats a digit, or always has one more key, is held to the default bounds."""
    digits = llm.tokenizer.encode("1111111111111111111111111111111111111111111111111111111111111111")
    for kind, most in (("integer", 17), ("number", 28)):
        asked = params(grammar=schema_grammar({"type": kind}), max_tokens=80)
        (completion,) = llm.generate([digits], asked)[0].completions
        assert completion.finish_reason is FinishReason.STOP
        assert len(completion.text) <= most
    point = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}}
    keys = llm.tokenizer.encode('{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7}\n' * 4)
    (completion,) = llm.generate([keys], params(grammar=schema_grammar(point)))[0].completions
    assert set(json.loads(completion.text)) <= {"x"}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(?=a)b"), "look-ahead"),
        (Grammar("regex", "(a)\\1"), "backreferences"),
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("lark", 'root ::= "a" ('), "Expected"),
        (Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'), "cannot be served"),
        (Grammar("json_schema", '{"$ref": "#"}'), "no text at all"),
    ],
)
def test_the_librarys_reason_is_told(llm, prompt, grammar, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        llm.generate([prompt], params(grammar=grammar))
    assert caught.value.field == "grammar"
    assert "\n" not in caught.value.message


def test_a_source_beyond_the_limit_is_no_grammar():
    with pytest.raises(InvalidRequest, match="bytes"):
        Grammar("regex", "a" * (MAX_SOURCE_BYTES + 1))
