"""The glossary and the techniques: complete, true to the commands that exist, and equal to the pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.cli.main import VERBS, build_parser, main
from ridgeline.lab.errors import BadInput
from ridgeline.lab.knowledge.entries import Technique, entries, find, techniques, terms
from ridgeline.lab.knowledge.pages import pages

ROOT = Path(__file__).resolve().parents[3]


def test_there_are_at_least_45_terms_each_with_a_formula_or_a_figure_and_a_command() -> None:
    assert len(terms()) >= 45
    assert [term.name for term in terms() if not (term.formula or term.figure) or not term.measure] == []


def test_every_technique_has_its_gate_both_sides_and_figures() -> None:
    for technique in techniques():
        assert technique.gate
        assert technique.pays
        assert technique.hurts
        assert technique.figures, technique.name


def test_every_name_that_an_entry_points_to_is_an_entry() -> None:
    for entry in entries():
        for name in entry.interacts if isinstance(entry, Technique) else entry.see:
            find(name)


def test_no_two_entries_have_the_same_name() -> None:
    names = [name.lower() for kind in (terms(), techniques()) for entry in kind for name in {entry.name}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_command_that_measures_it_exists(entry: object) -> None:
    command = entry.measure  # type: ignore[attr-defined]
    words = command.split()
    if words[0] == "ridgeline":
        assert words[1] in VERBS
        parser = build_parser((words[1],))
        help_text = _all_help(parser)
        for flag in re.findall(r"--[a-z-]+", command):
            assert flag in help_text, f"{entry.name}: {flag} is no flag of `ridgeline {words[1]}`"  # type: ignore[attr-defined]
    for path in re.findall(r"(?:benchmarks|tests)/[\w/.]+", command):
        assert (ROOT / path).exists()


def _all_help(parser: object) -> str:
    """The help of a parser and of all verbs below it."""
    text = parser.format_help()  # type: ignore[attr-defined]
    for action in parser._actions:  # type: ignore[attr-defined]
        if isinstance(action.choices, dict):
            text += "".join(_all_help(below) for below in action.choices.values())
    return text + "".join(_all_help(below) for below in parser.subverbs.values())  # type: ignore[attr-defined]


def test_files_named_among_the_figures_exist() -> None:
    for technique in techniques():
        for path in re.findall(r"docs/[\w/.-]+\.md", " ".join((*technique.figures, technique.here))):
            assert (ROOT / path).is_file(), path


def test_the_pages_are_what_the_tables_say() -> None:
    stale = [name for name, text in pages().items() if _written(name) != text]
    assert stale == [], "python -m ridgeline.lab.knowledge.pages"
    kept = {f"techniques/{path.name}" for path in (ROOT / "docs/techniques").glob("*.md")}
    assert kept == {name for name in pages() if name.startswith("techniques/")}


def _written(name: str) -> str | None:
    path = ROOT / "docs" / name
    return path.read_text(encoding="utf-8") if path.is_file() else None


@pytest.mark.parametrize("word", ["ttft", "Time To First Token", "speculative-decoding", "EAGLE", "$/Mtok"])
def test_a_term_is_found_in_any_spelling(word: str) -> None:
    assert find(word)


def test_an_unknown_term_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"did you mean .*TTFT"):
        find("ttf")
    with pytest.raises(BadInput, match="lists all entries"):
        find("zzzzzz")


def test_explain_prints_the_formula_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "prefix", "caching"]) == 0
    assert main(["explain", "tpot"]) == 0
    assert main(["explain"]) == 0
    shown = capsys.readouterr().out
    assert "(t_last − t_first) / (n_out − n_first)" in shown
    assert "36.6 %" in shown
    assert "Little's law" in shown


def test_explain_of_an_unknown_term_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "blah"]) == 2
    assert "no entry for 'blah'" in capsys.readouterr().err
