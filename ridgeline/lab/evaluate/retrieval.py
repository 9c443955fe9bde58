"""Retrieval and answers from files, measured with the user's own questions: `ridgeline evaluate retrieval`.

A line of the file is {"question": …, "relevant": […] or {name: grade}, "answer": …}. What is relevant is
named by a file's name, its id or its attribute `path`. Each question is searched by vectors, by words and by
both; results are files in the order of their best chunk. With answers, a model answers each question with
file_search, and the answer is compared with the passages that it cites and with the expected text.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate.tasks.read import Line, jsonl
from ridgeline.retrieval.answering.citations import support
from ridgeline.retrieval.answering.passages import Passage, joined
from ridgeline.retrieval.client import FileAnswer, Found, VectorStoreClient
from ridgeline.retrieval.metrics import Judgements, ndcg, recall, reciprocal_rank

MOST_RESULTS = 50  # of a search
NDCG_AT = 10
_FIELDS = frozenset(("id", "question", "relevant", "answer"))
Report = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, slots=True)
class Judged:
    """A question, the grades of the files that answer it, and the text that an answer should contain."""

    id: str
    question: str
    relevant: Judgements
    answer: str | None


@dataclass(frozen=True, slots=True)
class Leg:
    """A way to search: weights of vectors and words, and a ranker."""

    name: str
    weights: tuple[float, float]
    ranker: str | None = None


LEGS = (Leg("vector", (1, 0)), Leg("text", (0, 1)), Leg("hybrid", (1, 1)))


@dataclass(frozen=True, slots=True)
class Mean:
    """error: the standard error of the mean."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), error)


@dataclass(frozen=True, slots=True)
class LegResult:
    leg: str
    metrics: dict[str, Mean]
    search_ms: float  # median


@dataclass(frozen=True, slots=True)
class AnswerResult:
    """Rates over questions. faithfulness: the share of an answer's words that its passages have."""

    answered: int
    faithfulness: Mean
    cited: Mean  # answers with at least one citation
    quotes: int
    quotes_resolved: int  # whose offsets give the quote in the file
    right_file: Mean | None  # of the answers with a citation, those that cite a relevant file
    contains_answer: Mean | None  # of the questions with an expected text


@dataclass(frozen=True, slots=True)
class RetrievalReport:
    questions: int
    depth: int
    legs: list[LegResult]
    answers: AnswerResult | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)  # each question, for a file of results


def judged_questions(path: Path) -> list[Judged]:
    found: list[Judged] = []
    for line in jsonl(path):
        for name in line.fields:
            if name not in _FIELDS:
                raise line.wrong(name, f"is not known; known are {', '.join(sorted(_FIELDS))}")
        question, answer = line.fields.get("question"), line.fields.get("answer")
        if not isinstance(question, str) or not question.strip():
            raise line.wrong("question", "must be a text")
        if answer is not None and not isinstance(answer, str):
            raise line.wrong("answer", "must be a text")
        id = str(line.fields.get("id", line.number))
        found.append(Judged(id, question, _relevant(line), answer))
    if not found:
        raise BadInput(f"{path}: no questions in it")
    return found


def _relevant(line: Line) -> Judgements:
    given = line.fields.get("relevant")
    if isinstance(given, list) and given and all(isinstance(one, str) for one in given):
        return dict.fromkeys(given, 1.0)
    if isinstance(given, dict) and given:
        if all(isinstance(one, int | float) and not isinstance(one, bool) for one in given.values()):
            return {name: float(grade) for name, grade in given.items()}
        raise line.wrong("relevant", "grades must be numbers")
    raise line.wrong("relevant", "must be a list of files, or an object of files and grades")


def evaluate_retrieval(
    client: VectorStoreClient,
    store_id: str,
    questions: Sequence[Judged],
    *,
    ranker: str | None = None,
    depth: int = MOST_RESULTS,
    answers: bool = False,
    model: str | None = None,
    max_tokens: int = 256,
    report: Report = lambda what, done, total: None,
) -> RetrievalReport:
    check_names(client, store_id, questions)
    legs = [*LEGS, Leg(f"hybrid, {ranker}", (1, 1), ranker)] if ranker else list(LEGS)
    rows: list[dict[str, Any]] = [{"id": one.id, "question": one.question} for one in questions]
    results = []
    for leg in legs:
        scores: dict[str, list[float]] = {}
        times = []
        for number, one in enumerate(questions):
            begun = time.perf_counter()
            found = client.search(
                store_id, one.question, k=depth, weights=leg.weights, ranker=leg.ranker
            ).found
            times.append((time.perf_counter() - begun) * 1000)
            ranked = ranked_files(found, one.relevant)
            for name, value in _metrics(ranked, one.relevant, depth).items():
                scores.setdefault(name, []).append(value)
                rows[number].setdefault(leg.name, {})[name] = value
            rows[number][leg.name]["files"] = ranked[:NDCG_AT]
            report(leg.name, number + 1, len(questions))
        means = {name: Mean.of(values) for name, values in scores.items()}
        results.append(LegResult(leg.name, means, statistics.median(times)))
    told = None
    if answers:
        told = _answers(client, store_id, questions, rows, ranker, model, max_tokens, report)
    return RetrievalReport(len(questions), depth, results, told, rows)


def check_names(client: VectorStoreClient, store_id: str, questions: Sequence[Judged]) -> None:
    """A name that no file has would count as a miss of the search."""
    there = {name for file in client.files(store_id) for name in _names(file["id"], file)}
    for one in questions:
        for name in one.relevant:
            if name not in there:
                raise BadInput(f"question {one.id!r}: no file of the vector store is named {name!r}")


def ranked_files(found: Sequence[Found], relevant: Judgements) -> list[str]:
    """Each file once, at its best chunk, by the name that the judgements use."""
    ranked: dict[str, None] = {}
    for one in found:
        names = list(_names(one.file_id, {"filename": one.filename, "attributes": one.attributes}))
        ranked.setdefault(next((name for name in names if name in relevant), names[0]))
    return list(ranked)


def _names(id: str, file: Mapping[str, Any]) -> Iterator[str]:
    path = (file.get("attributes") or {}).get("path")
    if isinstance(path, str):
        yield path
    yield str(file.get("filename", id))
    yield id


def _metrics(ranked: Sequence[str], relevant: Judgements, depth: int) -> dict[str, float]:
    return {
        f"ndcg@{NDCG_AT}": ndcg(ranked, relevant, NDCG_AT),
        f"recall@{NDCG_AT}": recall(ranked, relevant, NDCG_AT),
        f"recall@{depth}": recall(ranked, relevant, depth),
        "mrr": reciprocal_rank(ranked, relevant),
    }


def _answers(
    client: VectorStoreClient,
    store_id: str,
    questions: Sequence[Judged],
    rows: list[dict[str, Any]],
    ranker: str | None,
    model: str | None,
    max_tokens: int,
    report: Report,
) -> AnswerResult:
    faithful, cited, right, expected = [], [], [], []
    quotes = resolved = 0
    texts: dict[str, str] = {}
    for number, one in enumerate(questions):
        answer = client.ask(
            [store_id], one.question, model=model, ranker=ranker, max_tokens=max_tokens, temperature=0.0
        )
        faithful.append(support(answer.text, passages_of(answer)))
        cited.append(float(bool(answer.quotes)))
        if answer.quotes:
            names = {name for quote in answer.quotes for name in _cited_names(answer, quote.file_id)}
            right.append(float(any(one.relevant.get(name, 0) > 0 for name in names)))
        for quote in answer.quotes:
            if quote.file_id not in texts:
                texts[quote.file_id] = client.text(quote.store_id, quote.file_id)
            quotes += 1
            resolved += texts[quote.file_id][quote.begin : quote.end] == quote.quote
        if one.answer is not None:
            expected.append(float(_plain(one.answer) in _plain(answer.text)))
        rows[number]["answer"] = {
            "text": answer.text,
            "faithfulness": faithful[-1],
            "quotes": [[quote.filename, quote.begin, quote.end] for quote in answer.quotes],
        }
        report("answers", number + 1, len(questions))
    return AnswerResult(
        len(questions),
        Mean.of(faithful),
        Mean.of(cited),
        quotes,
        resolved,
        Mean.of(right) if right else None,
        Mean.of(expected) if expected else None,
    )


def passages_of(answer: FileAnswer) -> list[Passage]:
    parts = [Passage("", one.file_id, one.filename, one.begin, one.end, one.text) for one in answer.found]
    return joined(parts)


def _cited_names(answer: FileAnswer, file_id: str) -> set[str]:
    return {
        name
        for one in answer.found
        if one.file_id == file_id
        for name in _names(file_id, {"filename": one.filename, "attributes": one.attributes})
    }


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def report_text(found: RetrievalReport) -> str:
    names = list(found.legs[0].metrics)
    width = max(8, *(len(leg.leg) for leg in found.legs))
    lines = [
        f"{found.questions} questions; files ranked by their best chunk, {found.depth} chunks a search",
        "",
    ]
    lines.append(f"{'search':<{width}}" + "".join(f"{name:>18}" for name in names) + f"{'median ms':>12}")
    for leg in found.legs:
        cells = "".join(f"{f'{leg.metrics[n].value:.4f} ±{leg.metrics[n].error:.3f}':>18}" for n in names)
        lines.append(f"{leg.leg:<{width}}{cells}{leg.search_ms:>12.1f}")
    if (told := found.answers) is not None:
        lines += [
            "",
            f"{told.answered} answers",
            f"  faithfulness     {told.faithfulness.value:.4f} ±{told.faithfulness.error:.3f}  "
            "share of an answer's words that one sentence of its passages has",
            f"  with a citation  {told.cited.value:.1%}",
            f"  citations        {told.quotes_resolved} of {told.quotes} resolve to their quote",
        ]
        if told.right_file is not None:
            lines.append(f"  right file       {told.right_file.value:.1%} of the answers with a citation")
        if told.contains_answer is not None:
            lines.append(f"  expected text    in {told.contains_answer.value:.1%} of the answers")
    return "\n".join(lines)
