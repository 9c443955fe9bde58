"""Retrieval measured with a user's own questions: what is read, ranked, averaged. The server is a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate.retrieval import evaluate_retrieval, judged_questions, report_text
from ridgeline.retrieval.client import FileAnswer, Found, Quote, SearchAnswer

TEXTS = {"f1": "Black tea is fully oxidised.", "f2": "Coffee is roasted.", "f3": "Water boils."}
NAMES = {"f1": "docs/tea.md", "f2": "coffee.txt", "f3": "docs/water.md"}
RANKS = {(1, 0): ["f2", "f1"], (0, 1): ["f1", "f1", "f2"], (1, 1): ["f3", "f2", "f1"]}


def found(id: str) -> Found:
    return Found(id, Path(NAMES[id]).name, 0.5, TEXTS[id], 0, len(TEXTS[id]), {"path": NAMES[id]})


class Script:
    """The part of VectorStoreClient that an evaluation needs."""

    def files(self, store_id: str) -> list[dict[str, Any]]:
        return [
            {"id": id, "filename": Path(name).name, "attributes": {"path": name}}
            for id, name in NAMES.items()
        ]

    def search(self, store_id: str, query: str, **options: Any) -> SearchAnswer:
        ranked = ["f1"] if options["ranker"] else RANKS[options["weights"]]
        return SearchAnswer([found(id) for id in ranked], [])

    def ask(self, store_ids: list[str], question: str, **options: Any) -> FileAnswer:
        quote = Quote("f1", "tea.md", "vs", 0, 9, "Black tea", 5)
        wrong = Quote("f1", "tea.md", "vs", 0, 9, "Green tea", 5)
        return FileAnswer("Black tea is oxidised [1].", [quote, wrong], [found("f1")], True, {})

    def text(self, store_id: str, file_id: str) -> str:
        return TEXTS[file_id]


def questions(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_legs_are_ranked_by_files_and_averaged(tmp_path: Path) -> None:
    asked = judged_questions(
        questions(
            tmp_path,
            {"question": "tea?", "relevant": ["tea.md"], "answer": "tea is  OXIDISED"},
            {"id": "x", "question": "coffee?", "relevant": {"coffee.txt": 2}},
        )
    )
    client: Any = Script()
    got = evaluate_retrieval(client, "vs", asked, ranker="best", answers=True)
    mrr = {leg.leg: leg.metrics["mrr"].value for leg in got.legs}
    assert mrr == pytest.approx(
        {
            "vector": (1 / 2 + 1) / 2,
            "text": (1 + 1 / 2) / 2,
            "hybrid": (1 / 3 + 1 / 2) / 2,
            "hybrid, best": 0.5,
        }
    )
    assert got.legs[0].metrics["recall@10"].value == 1.0
    assert got.rows[0]["text"]["files"] == ["tea.md", "coffee.txt"]  # one file once, by the name asked for
    told = got.answers
    assert told is not None
    assert told.faithfulness.value == 1.0
    assert (told.quotes, told.quotes_resolved) == (4, 2)
    assert told.right_file is not None
    assert told.right_file.value == 0.5  # the second question's file was not cited
    assert told.contains_answer is not None
    assert told.contains_answer.value == 1.0  # of the one question with an expected text
    text = report_text(got)
    assert "hybrid, best" in text
    assert "2 of 4 resolve" in text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"relevant": ["a"]}, "'question'"),
        ({"question": " ", "relevant": ["a"]}, "'question'"),
        ({"question": "x"}, "'relevant'"),
        ({"question": "x", "relevant": []}, "'relevant'"),
        ({"question": "x", "relevant": {"a": True}}, "grades must be numbers"),
        ({"question": "x", "relevant": ["a"], "answer": 1}, "'answer'"),
        ({"question": "x", "relevant": ["a"], "k": 1}, "'k'"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=r"line 1, field .*") as raised:
        judged_questions(questions(tmp_path, line))
    assert told in str(raised.value)


def test_a_file_that_the_store_has_not_is_refused(tmp_path: Path) -> None:
    asked = judged_questions(questions(tmp_path, {"id": "q7", "question": "x", "relevant": ["none.md"]}))
    client: Any = Script()
    with pytest.raises(BadInput, match=r"'q7': no file of the vector store is named 'none\.md'"):
        evaluate_retrieval(client, "vs", asked)
