"""Sample items of reports: which are shown, and how each kind of item and answer reads."""

from __future__ import annotations

import json

from ridgeline.lab.evaluate.evaluation import evaluate, load_tasks
from ridgeline.lab.evaluate.options import EvaluateOptions
from ridgeline.lab.evaluate.reports.evaluation_page import evaluation_page
from ridgeline.lab.evaluate.reports.gate_page import gate_page
from ridgeline.lab.evaluate.samples import MOST_CHARACTERS, samples_of
from ridgeline.lab.evaluate.scoring.outcome import Outcome
from ridgeline.lab.evaluate.tasks.items import (
    Choices,
    Contexts,
    LastWord,
    Passage,
    Program,
    Question,
    digest_of,
)
from ridgeline.lab.evaluate.tasks.table import Task
from tests.lab.evaluate.scripted import ScriptedSubject
from tests.lab.evaluate.test_gate import run, scripted


def outcomes(task, *pairs):
    """(values, answer, more) for each item."""
    return {
        item.id: Outcome(task.name, item.id, digest_of(item), values, answer, **more)
        for item, (values, answer, more) in zip(task.items, pairs, strict=True)
    }


def test_each_kind_of_item_is_shown_with_its_expected_and_its_given_answer():
    cases = [
        (Choices("1", "Why?", ("so", "not"), 1), "acc", ({"acc": 0.0}, "0", {}), "(1) not", "(0) so"),
        (Contexts("1", ("he", "she"), " ran.", 0), "acc", ({"acc": 1.0}, "0", {}), "(0) he", "(0) he"),
        (
            LastWord("1", "I care about", " signs"),
            "acc",
            ({"acc": 0.0, "logprob": -3.5}, "", {}),
            "signs",
            "another word (log-probability of this one: -3.50)",
        ),
        (
            Question("1", "2 + 2?", "#### 4", "strict_number"),
            "exact_match",
            ({"exact_match": 1.0}, "4", {"text": "It is #### 4"}),
            "#### 4",
            "It is #### 4",
        ),
        (
            Program("1", "def f():", "f", "…"),
            "pass@1",
            ({"pass@1": 0.0}, " return 1", {"note": "time limit"}),
            "a program that passes the tests of f",
            " return 1\n[time limit]",
        ),
        (
            Passage("1", "Some text."),
            "",
            ({"logprob": -6.0, "tokens": 3.0}, "", {}),
            "",
            "2.0000 nats per token",
        ),
    ]
    for item, primary, pair, expected, answered in cases:
        task = Task("t", (item,), primary)
        (sample,) = samples_of(task, {"m": outcomes(task, pair)}, 3)
        assert (sample.expected, sample.answers[0].text) == (expected, answered)
        right = sample.answers[0].right
        assert right == (None if not primary else pair[0][primary] == 1.0)


def test_flipped_items_come_first_then_changed_answers_then_others_spread_over_the_task():
    items = tuple(Choices(str(n), f"item {n}", ("a", "b", "c"), 0) for n in range(8))
    task = Task("t", items, "acc")
    same = ({"acc": 1.0}, "0", {})
    reference = [same] * 8
    candidate = list(reference)
    candidate[6] = ({"acc": 0.0}, "1", {})
    reference[3], candidate[3] = ({"acc": 0.0}, "1", {}), ({"acc": 0.0}, "2", {})
    found = samples_of(task, {"a": outcomes(task, *reference), "b": outcomes(task, *candidate)}, 5)
    assert [sample.item for sample in found] == ["6", "3", "0", "4", "1"]
    assert [answer.right for answer in found[0].answers] == [True, False]


def test_long_prompts_keep_their_end_and_long_answers_their_beginning():
    item = Question("1", "x" * 5000 + "the question", "y")
    task = Task("t", (item,), "exact_match")
    (sample,) = samples_of(task, {"m": outcomes(task, ({"exact_match": 0.0}, "no" * 5000, {}))}, 1)
    assert sample.prompt.endswith("the question")
    assert len(sample.prompt) == MOST_CHARACTERS + 2
    assert sample.answers[0].text.startswith("nono")
    assert len(sample.answers[0].text) == MOST_CHARACTERS + 2


def test_an_evaluation_shows_samples_with_the_generated_text(tmp_path):
    file = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "match": "number"} for n in range(9)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = EvaluateOptions(tasks=str(file), samples=2)
    tasks, sizes = load_tasks(options)
    subject = ScriptedSubject(lambda pair: 0.0, name="m", says=lambda text: f"<b>so {text[0]}</b> 5")
    found = evaluate(subject, tasks, sizes, options, tmp_path / "out", lambda *_: None)
    samples = found.tasks[0].samples
    assert [sample.prompt for sample in samples] == ["0 + 1 =", "4 + 1 ="]
    assert [sample.answers[0].right for sample in samples] == [False, True]
    page = evaluation_page(found)
    assert "&lt;b&gt;so 4&lt;/b&gt; 5" in page  # the model's text is no markup
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["tasks"][0]["samples"]


def test_a_gate_shows_the_flipped_items_with_both_answers(monkeypatch, options, tmp_path):
    subjects = {"a": scripted("a"), "b": scripted("b", wrong=frozenset(range(10, 30)))}
    found = run(monkeypatch, options, tmp_path / "g", subjects)
    of_choices = [sample for sample in found.samples if sample.task == "choices"]
    assert [sample.item for sample in of_choices] == ["11", "12", "13"]
    assert [answer.text for answer in of_choices[0].answers] == ["(0) right", "(1) wrong"]
    page = gate_page(found)
    assert "item 10 is" in page
    assert "(1) wrong" in page
