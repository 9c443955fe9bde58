"""Passages, prompt and citations: offsets always resolve to the file's text."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.retrieval.answering.citations import citations, support
from ridgeline.retrieval.answering.passages import Passage, chosen, joined
from ridgeline.retrieval.answering.prompt import RULES, system_text, user_text

TEA = "Green tea is not oxidised. Black tea is fully oxidised, e.g. Assam.\nOolong lies in between.\n"
COFFEE = "Coffee beans are roasted at 200 degrees. Light roasts end at the first crack.\n"


def passage(text: str, begin: int = 0, end: int | None = None, file: str = "tea") -> Passage:
    end = len(text) if end is None else end
    return Passage("vs", f"file-{file}", f"{file}.txt", begin, end, text[begin:end])


def starts(text: str) -> list[int]:
    return [word.start() for word in re.finditer(r"\S+", text)]


def test_a_mark_cites_the_sentence_of_the_passage_that_fits() -> None:
    answer = "Black tea is oxidised [1]. Light roasts end at the first crack. [2] I like both."
    passages = [passage(TEA), passage(COFFEE, file="coffee")]
    found = citations(answer, passages)
    assert [(one.passage.filename, one.quote) for one in found] == [
        ("tea.txt", "Black tea is fully oxidised, e.g. Assam."),
        ("coffee.txt", "Light roasts end at the first crack."),
    ]
    assert [answer[: one.index].rpartition(" ")[2] for one in found] == ["[1].", "[2]"]
    for one, text in zip(found, (TEA, COFFEE), strict=True):
        assert text[one.begin : one.end] == one.quote


def test_a_sentence_without_a_mark_is_cited_only_if_a_passage_has_its_words() -> None:
    passages = [passage(TEA), passage(COFFEE, file="coffee")]
    assert [one.quote for one in citations("Coffee beans are roasted at 200 degrees.", passages)] == [
        "Coffee beans are roasted at 200 degrees."
    ]
    assert citations("Wine is made of grapes. Yes. Black.", passages) == []
    assert citations("Wine [9] is old.", passages) == []


def test_support_is_the_share_of_words_that_stand_in_the_passages() -> None:
    assert support("Green tea is not oxidised [1].", [passage(TEA)]) == 1.0
    assert support("Wine is made of grapes.", [passage(TEA)]) == 0.0
    assert support("", [passage(TEA)]) == 1.0
    assert support("Anything.", []) == 0.0


@given(
    st.text(alphabet="ab .!?\n[]12é", max_size=200),
    st.lists(st.text(alphabet="ab .!?\né", min_size=1, max_size=120), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_every_citation_resolves_character_by_character(answer: str, files: list[str], begin: int) -> None:
    passages = [passage(text, min(begin, len(text) - 1), file=str(i)) for i, text in enumerate(files)]
    for one in citations(answer, passages):
        text = files[int(one.passage.filename.removesuffix(".txt"))]
        assert text[one.begin : one.end] == one.quote
        assert 0 <= one.index <= len(answer)


SPANS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=8)


@given(SPANS)
def test_joined_passages_are_the_union_of_their_parts(spans: list[tuple[int, int]]) -> None:
    text = "".join(chr(0x100 + i) for i in range(130))
    parts = [passage(text, begin, begin + length) for begin, length in spans]
    whole = joined(parts)
    assert all(text[one.begin : one.end] == one.text for one in whole)
    covered = {i for one in parts for i in range(one.begin, one.end)}
    assert sorted(i for one in whole for i in range(one.begin, one.end)) == sorted(covered)


@given(SPANS, st.integers(1, 60))
def test_chosen_passages_fit_the_budget_and_begin_with_the_best(
    spans: list[tuple[int, int]], budget: int
) -> None:
    text = "w " * 70
    found = [
        passage(text, 2 * (begin // 2), min(2 * (begin // 2) + 2 * length, 140)) for begin, length in spans
    ]
    taken = chosen(found, budget, starts)
    assert sum(len(starts(one.text)) for one in taken) <= budget
    best = found[0]
    assert any(one.begin <= best.begin < one.end for one in taken)
    assert all(text[one.begin : one.end] == one.text for one in taken)


def test_the_prompt_keeps_the_stable_part_first() -> None:
    passages = [passage(TEA)]
    assert system_text("Be brief.") == f"Be brief.\n\n{RULES}"
    first, second = (user_text(passages, question) for question in ("Which is green?", "Which is black?"))
    shared = first[: first.index("Which is")]
    assert second.startswith(shared)
    assert "[1] tea.txt\nGreen tea" in shared
