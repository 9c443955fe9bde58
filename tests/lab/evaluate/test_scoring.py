"""Scores as lm-eval computes them: choices, last words, numbers in answers, metrics with their errors."""

from __future__ import annotations

import math

import pytest

from ridgeline.lab.errors import LabError
from ridgeline.lab.evaluate.scoring.generated import cut_at_stops, judged_text, program_of
from ridgeline.lab.evaluate.scoring.likelihood import Likelihood, Pair, judged, pairs_of
from ridgeline.lab.evaluate.scoring.metrics import metrics_of
from ridgeline.lab.evaluate.scoring.outcome import Outcome
from ridgeline.lab.evaluate.tasks.items import Choices, Contexts, LastWord, Passage, Program, Question


def likelihoods(*logprobs):
    return [Likelihood(value, False, 1) for value in logprobs]


def test_acc_takes_the_sum_and_acc_norm_the_mean_per_character():
    item = Choices("1", "q", ("no", "a long answer"), 1)
    assert pairs_of(item) == [Pair("q", " no"), Pair("q", " a long answer")]
    values, answer = judged(item, likelihoods(-3.0, -6.0))
    assert (values["acc"], values["acc_norm"], answer) == (0.0, 1.0, "0")


def test_bytes_and_characters_part_beyond_ascii():
    item = Choices("1", "q", ("ééé", "abcde"), 1)
    values, _ = judged(item, likelihoods(-3.0, -4.0))  # 1.0 and 0.8 per character, 0.5 and 0.8 per byte
    assert (values["acc_norm"], values["acc_bytes"]) == (1.0, 0.0)


def test_a_context_wins_by_the_likelihood_of_the_continuation():
    item = Contexts("1", ("she", "he"), " ran.", 1)
    assert pairs_of(item) == [Pair("she", " ran."), Pair("he", " ran.")]
    assert judged(item, likelihoods(-2.0, -1.0)) == ({"acc": 1.0}, "1")


def test_a_last_word_counts_if_every_token_is_greedy():
    values, _ = judged(LastWord("1", "c", " w"), [Likelihood(-2.5, True, 2)])
    assert values == {"acc": 1.0, "logprob": -2.5}


def test_spaces_at_the_end_of_a_context_go_to_the_continuation():
    assert Pair("a  ", "b").split_at_word() == Pair("a", "  b")
    assert Pair("  ", "b").split_at_word() == Pair("  ", "b")


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("So 3 + 4 = 7.\n#### 7", 1.0, 1.0),
        ("#### 7.", 1.0, 1.0),
        ("It is $7.", 0.0, 1.0),
        ("It is 1,007.", 0.0, 0.0),
        ("7 then 8", 0.0, 0.0),
        ("no number", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_gsm8k_extracts_strictly_and_flexibly(text, strict, flexible):
    item = Question("1", "p", "reasons 1 2 3\n#### 7", "strict_number")
    values, _ = judged_text(item, text)
    assert (values["strict_match"], values["flexible_extract"]) == (strict, flexible)
    assert values["exact_match"] == strict


def test_thousands_and_currency_are_ignored():
    item = Question("1", "p", "#### 1,250", "number")
    assert judged_text(item, "He pays $1250.")[0]["exact_match"] == 1.0


def test_exact_and_contained_answers():
    exact, contains = (Question("1", "p", "Paris", match) for match in ("exact", "contains"))
    assert judged_text(exact, " Paris\n")[0]["exact_match"] == 1.0
    assert judged_text(exact, "It is Paris")[0]["exact_match"] == 0.0
    assert judged_text(contains, "It is Paris")[0]["exact_match"] == 1.0


def test_a_program_ends_at_the_first_stop_and_calls_its_test():
    item = Program("1", "def f():\n", "f", "def check(c): assert c() == 1\n")
    body = cut_at_stops("    return 1\ndef g(): pass\n#", ("\n#", "\ndef"))
    assert body == "    return 1"
    source = program_of(item, body)
    exec(compile(source, "program", "exec"), {})
    with pytest.raises(AssertionError):
        exec(compile(program_of(item, "    return 2"), "program", "exec"), {})


def test_without_a_token_before_a_text_its_first_word_does_not_count():
    item = Passage("1", " \nÉté two words")
    assert pairs_of(item, has_prefix=False) == [Pair(" \nÉté", " two words")]
    values, _ = judged(item, [Likelihood(-4.0, False, 2)], has_prefix=False)
    assert (values["words"], values["bytes"]) == (2.0, 10.0)
    with pytest.raises(LabError, match="text 2: one word alone"):
        pairs_of(Passage("2", "word "), has_prefix=False)


def test_the_mean_and_its_error():
    outcomes = [Outcome("t", str(n), "", {"acc": float(n < 3)}) for n in range(4)]
    (acc,) = metrics_of(outcomes)
    assert acc.value == 0.75
    assert acc.error == pytest.approx(math.sqrt(0.25 / 4), rel=1e-9)


def test_perplexities_of_texts_weigh_by_length():
    item = Passage("1", "two words")
    values, _ = judged(item, [Likelihood(-4.0, False, 4)])
    outcomes = [
        Outcome("t", "1", "", values),
        Outcome("t", "2", "", {"logprob": -8.0, "tokens": 4.0, "words": 2.0, "bytes": 9.0}),
    ]
    found = {metric.name: metric for metric in metrics_of(outcomes)}
    assert found["word_perplexity"].value == pytest.approx(math.exp(12 / 4))
    assert found["token_perplexity"].value == pytest.approx(math.exp(12 / 8))
    assert found["bits_per_byte"].value == pytest.approx(12 / 18 / math.log(2))
    assert found["token_perplexity"].error > 0
    assert metrics_of([]) == []
