"""Tasks: prompts as lm-eval has them, a user's own files, errors with line and field, the order of items."""

from __future__ import annotations

import gzip
import json

import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate.run import sampled
from ridgeline.lab.evaluate.scoring.generated import judged_text
from ridgeline.lab.evaluate.tasks.items import Choices, LastWord, Passage, Question, digest_of
from ridgeline.lab.evaluate.tasks.own import own_items
from ridgeline.lab.evaluate.tasks.table import TASKS, load_task, passages


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_arc_asks_question_and_answer(tmp_path):
    line = {"query": "Question: Why?", "choices": ["so", "not"], "gold": 1}
    write(tmp_path / "icl-evals" / "arc_easy.jsonl", line)
    (item,) = load_task("arc_easy", tmp_path).items
    assert item == Choices("arc_easy/1", "Question: Why?\nAnswer:", ("so", "not"), 1)


def test_lambada_puts_the_space_before_the_word(tmp_path):
    write(tmp_path / "lambada_openai.jsonl", {"context": "I do not care about", "continuation": "signs"})
    (item,) = load_task("lambada_openai", tmp_path).items
    assert item == LastWord("lambada_openai/1", "I do not care about", " signs")


def test_gsm8k_shows_five_solved_questions_and_does_not_ask_them(tmp_path):
    lines = [{"question": f"Q{n}", "answer": f"A{n}\n#### {n}"} for n in range(8)]
    write(tmp_path / "gsm8k" / "test.jsonl", *lines)
    task = load_task("gsm8k", tmp_path)
    assert len(task.items) == 3
    first = task.items[0]
    assert isinstance(first, Question)
    assert first.prompt.startswith("Question: Q3\nAnswer: A3\n#### 3\n\n")
    assert first.prompt.endswith("#### 7\n\nQuestion: Q0\nAnswer:")
    write(tmp_path / "gsm8k" / "train.jsonl", *({"question": "T", "answer": "#### 1"} for _ in range(5)))
    assert len(load_task("gsm8k", tmp_path).items) == 8


def test_svamp_is_asked_as_gsm8k_with_the_equation_as_the_solution(tmp_path):
    lines = [
        {"context": f"Q{n}", "chain_of_thought": f"( {n}.0 + 1.0 )", "answer": f"{n + 1}"} for n in range(7)
    ]
    write(tmp_path / "icl-evals" / "svamp.jsonl", *lines)
    task = load_task("svamp", tmp_path)
    assert (task.primary, task.needs_logprobs) == ("exact_match", False)
    first, second = task.items
    assert first.prompt.startswith("Question: Q2\nAnswer: ( 2.0 + 1.0 )\n#### 3\n\nQuestion: Q3\n")
    assert first.prompt.endswith("#### 7\n\nQuestion: Q0\nAnswer:")
    assert judged_text(second, " ( 1.0 + 1.0 )\n#### 2")[0]["exact_match"] == 1.0
    values, _ = judged_text(second, " 2.")  # the number without the form: flexible alone
    assert (values["exact_match"], values["flexible_extract"]) == (0.0, 1.0)
    write(tmp_path / "icl-evals" / "svamp_train.jsonl", *lines[:5])
    assert len(load_task("svamp", tmp_path).items) == 7


def test_humaneval_is_read_packed(tmp_path):
    line = {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": "def check(c): pass"}
    (tmp_path / "humaneval").mkdir()
    with gzip.open(tmp_path / "humaneval" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(line))
    assert [item.id for item in load_task("humaneval", tmp_path).items] == ["HumanEval/0"]


def test_passages_are_articles_in_windows_that_join_to_the_text():
    text = " \n = One = \n \n a b c d e \n = = Part = = \n f g \n = Two = \n h \n"
    found = passages("t", text, window_words=4)
    assert "".join(passage.text for passage in found) == text
    assert [passage.id for passage in found] == ["t/1.1", "t/1.2", "t/1.3", "t/1.4", "t/2.1"]
    assert found[-1].text.split() == ["=", "Two", "=", "h"]


def test_a_users_file_may_hold_each_kind_of_item(tmp_path):
    kinds = {
        "choices": {"query": "q", "choices": ["a", "b"], "gold": 0},
        "question": {"prompt": "p", "answer": "a", "match": "contains", "stop": ["\n"], "max_tokens": 8},
        "text": {"text": "some words", "id": "mine"},
    }
    found = {name: own_items(write(tmp_path / f"{name}.jsonl", line))[0] for name, line in kinds.items()}
    assert found["choices"] == Choices("1", "q", ("a", "b"), 0)
    assert found["question"] == Question("1", "p", "a", "contains", ("\n",), 8)
    assert found["text"] == Passage("mine", "some words")
    task = load_task(str(tmp_path / "text.jsonl"), None)
    assert (task.name, task.is_text, task.needs_logprobs) == ("text", True, True)


def test_a_line_may_hold_unicode_line_separators(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_bytes('{"text": "one\u2028two\u0085three"}\r\n{"text": "four"}'.encode())
    assert [item.text for item in own_items(path)] == ["one\u2028two\u0085three", "four"]


GOOD = {"query": "q", "choices": ["a", "b"], "gold": 0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1]", "line 2: must be an object, got a list"),
        ({**GOOD, "gold": 2}, "line 2, field 'gold': must be between 0 and 1, got 2"),
        ({**GOOD, "gold": "a"}, "line 2, field 'gold': must be an integer, got a string"),
        ({"choices": ["a", "b"], "gold": 0}, "line 2, field 'query': is missing"),
        ({**GOOD, "choices": ["a"]}, "line 2, field 'choices': needs at least 2 entries"),
        ({**GOOD, "answer": "a"}, "line 2, field 'answer': is unknown here"),
        ({**GOOD, "id": "1"}, "line 2, field 'id': '1' is also in line 1"),
        (
            {"prompt": "p", "answer": "a"},
            "line 2: a question with an answer, but the file began with a multi",
        ),
        ({"question": "q"}, "line 2: no kind of item has the fields question"),
    ],
)
def test_an_error_names_the_line_and_the_field(tmp_path, line, message):
    path = write(tmp_path / "own.jsonl", GOOD, line)
    with pytest.raises(BadInput) as error:
        own_items(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_an_unknown_task_names_the_nearest(tmp_path):
    with pytest.raises(BadInput, match="did you mean arc_easy"):
        load_task("arc_eassy", tmp_path)
    with pytest.raises(BadInput, match="RIDGELINE_DATA"):
        load_task("arc_easy", None)
    with pytest.raises(BadInput, match=r"has none of gsm8k/test\.jsonl"):
        load_task("gsm8k", tmp_path)


def test_a_sample_is_the_same_for_every_subject_and_in_order():
    items = [Passage(str(number), f"text {number}") for number in range(100)]
    first = sampled(items, 10, seed=3, task="t")
    assert first == sampled(items, 10, seed=3, task="t")
    assert first != sampled(items, 10, seed=4, task="t")
    places = [int(item.id) for item in first]
    assert places == sorted(places)
    assert sampled(items, None, 3, "t") == sampled(items, 1000, 3, "t") == tuple(items)


def test_a_digest_follows_the_content():
    assert digest_of(Passage("1", "a")) != digest_of(Passage("1", "b"))


def test_every_task_reads_the_real_data(shared_data):
    named = set(TASKS) - {"mmlu", "hellaswag"}  # their data is not here
    sizes = {name: len(load_task(name, shared_data).items) for name in named}
    assert sizes["arc_easy"] == 2376
    assert sizes["lambada_openai"] == 5153
    assert sizes["gsm8k"] == 1319 - 5
    assert sizes["svamp"] == 300 - 5
    assert sizes["humaneval"] == 164
    assert sizes["perplexity"] > 600


def test_mmlu_asks_with_letters_after_shots_of_the_subject(tmp_path):
    def line(subject, question, answer):
        return {"subject": subject, "question": question, "choices": ["w", "x", "y", "z"], "answer": answer}

    write(tmp_path / "mmlu" / "test.jsonl", line("high_school_art", " Which? ", 2))
    (item,) = load_task("mmlu", tmp_path).items
    head = "The following are multiple choice questions (with answers) about high school art.\n\n"
    asked = "Which?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    assert item == Choices("mmlu/1", head + asked, ("A", "B", "C", "D"), 2)
    shots = [line("high_school_art", f"Shot {n}", n % 4) for n in range(7)]
    write(tmp_path / "mmlu" / "dev.jsonl", line("law", "Other", 0), *shots)
    (item,) = load_task("mmlu", tmp_path).items
    assert item.prompt.startswith(head + "Shot 0\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\nShot 1\n")
    assert item.prompt.endswith("Shot 4\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\n" + asked)


def test_hellaswag_is_cleaned_as_lm_eval_does(tmp_path):
    line = {
        "activity_label": "Making tea",
        "ctx_a": "[header] How to make tea [title] Boil water.",
        "ctx_b": "then she",
        "endings": ["pours  it. [step] Done.", "sleeps."],
        "label": "1",
    }
    write(tmp_path / "hellaswag" / "validation.jsonl", line)
    (item,) = load_task("hellaswag", tmp_path).items
    prompt = "Making tea: How to make tea. Boil water. Then she"
    assert item == Choices("hellaswag/1", prompt, ("pours it. Done.", "sleeps."), 1)
