"""`ridgeline rag` against a real server with two models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.cli.rag.files import found_files, strategy_of
from ridgeline.options import OptionError
from tests.conftest import LiveServer, await_ready, start_server
from tests.patience import PATIENCE_S

TEA = "# Tea\n\nGreen tea is not oxidised. Black tea is fully oxidised.\n\n# Water\n\nUse 75 degrees.\n"
COFFEE = "Coffee beans are roasted at about 200 degrees. A light roast ends at the first crack.\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("rag")
    flags = ("--state-dir", str(folder / "state"), "--deterministic")
    started = start_server(folder / "log", *flags, models=("smollm2-135m", "all-minilm-l6-v2"))
    try:
        await_ready(started)
        yield started
    finally:
        started.process.terminate()
        started.process.wait(PATIENCE_S)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs" / ".git").mkdir(parents=True)
    (tmp_path / "docs" / ".git" / "hidden.md").write_text("hidden")
    (tmp_path / "docs" / "tea.md").write_text(TEA)
    (tmp_path / "docs" / "pictures").mkdir()
    (tmp_path / "docs" / "pictures" / "cup.png").write_bytes(b"\x89PNG")
    (tmp_path / "coffee.txt").write_text(COFFEE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rag(server: LiveServer, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["rag", *arguments, "--url", server.base_url])
    out, err = capsys.readouterr()
    return code, out, err


def test_files_are_added_once_replaced_asked_and_removed(
    server: LiveServer, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ("--store", "teas")
    code, out, err = rag(server, capsys, "add", "docs", "coffee.txt", *store, "--attribute", "year=2026")
    assert (code, out) == (0, "2 files are searchable in 'teas'\n"), err
    _, out, _ = rag(server, capsys, "add", "docs", "coffee.txt", *store, "--attribute", "year=2026")
    assert out == "0 files are searchable in 'teas'; 2 had not changed\n"
    (files / "coffee.txt").write_text(COFFEE + "Robusta is bitter.\n")
    _, out, _ = rag(server, capsys, "add", "docs", "coffee.txt", *store, "--attribute", "year=2026")
    assert out == "1 files are searchable in 'teas'; 1 had not changed\n"
    _, out, _ = rag(server, capsys, "list")
    assert "teas" in out
    assert "     2 files" in out

    _, out, _ = rag(server, capsys, "ask", "Which coffee is bitter?", "--search-only", *store)
    assert out.startswith(" 1. ")
    assert "coffee.txt" in out.splitlines()[0]
    where = '{"type": "eq", "key": "path", "value": "docs/tea.md"}'
    asked = ("ask", "Is black tea oxidised?", "--filter", where, "--explain", "--search-only", *store)
    _, out, _ = rag(server, capsys, *asked)
    assert "vector         rank 1" in out
    assert "excluded by path eq 'docs/tea.md'" in out

    asked = ("ask", "Is black tea oxidised?", "--max-tokens", "24", "--temperature", "0", *store)
    code, told, _ = rag(server, capsys, *asked, "--json")
    answer = json.loads(told)
    assert code == 0
    assert {one["attributes"]["path"] for one in answer["found"]} == {"docs/tea.md", "coffee.txt"}
    for quote in answer["quotes"]:
        text = {"tea.md": TEA, "coffee.txt": COFFEE + "Robusta is bitter.\n"}[quote["filename"]]
        assert text[quote["begin"] : quote["end"]] == quote["quote"]
    _, out, _ = rag(server, capsys, *asked)
    assert out.startswith(answer["text"] + "\n")
    assert " tokens · prompt " in out
    assert "has changed" not in out

    _, out, _ = rag(server, capsys, "remove", "teas")
    assert out == "removed 'teas' and 2 files\n"
    code, _, err = rag(server, capsys, "ask", "x", *store)
    assert code == 1
    assert "has no vector store 'teas': `ridgeline rag add FILE --store teas`" in err


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_there(
    server: LiveServer, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "bad.pdf").write_bytes(b"no pdf")
    code, out, err = rag(server, capsys, "add", "bad.pdf", "coffee.txt", "--store", "part")
    assert (code, out) == (1, "1 files are searchable in 'part'; 1 could not be read\n")
    assert err.startswith("bad.pdf: ")
    rag(server, capsys, "remove", "part")


def test_eval_measures_search_and_answers(
    server: LiveServer, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rag(server, capsys, "add", "docs", "coffee.txt", "--store", "judged")
    lines: list[dict[str, Any]] = [
        {"question": "Is black tea oxidised?", "relevant": ["docs/tea.md"], "answer": "oxidised"},
        {"question": "When does a light roast end?", "relevant": {"coffee.txt": 2}},
    ]
    (files / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = ("eval", "q.jsonl", "--store", "judged", "--ranker", "maxsim", "--answers", "--max-tokens", "16")
    code, out, err = rag(server, capsys, *asked, "--json", "--out", "rows.jsonl")
    assert code == 0, err
    found = json.loads(out)
    assert [leg["leg"] for leg in found["legs"]] == ["vector", "text", "hybrid", "hybrid, maxsim"]
    for leg in found["legs"]:
        assert leg["metrics"]["ndcg@10"]["value"] == pytest.approx(1.0), leg
    told = found["answers"]
    assert told["answered"] == 2
    assert told["quotes"] == told["quotes_resolved"]
    rows = [json.loads(line) for line in (files / "rows.jsonl").read_text().splitlines()]
    assert rows[0]["hybrid"]["files"][0] == "docs/tea.md"
    code, out, _ = rag(server, capsys, "eval", "q.jsonl", "--store", "judged")
    assert "2 questions" in out
    (files / "q.jsonl").write_text('{"question": "x", "relevant": ["docs/none.md"]}')
    code, _, err = rag(server, capsys, "eval", "q.jsonl", "--store", "judged")
    assert code == 2
    assert "no file of the vector store is named 'docs/none.md'" in err
    rag(server, capsys, "remove", "judged")


def test_wrong_usage_is_told_before_anything_is_sent(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ("--url", "http://127.0.0.1:1")
    for arguments, told in (
        (("add", "missing.md"), "missing.md: there is no such file or folder"),
        (("add", "docs/pictures"), "no file to add"),
        (("add", "docs", "--attribute", "x"), "--attribute 'x': give KEY=VALUE"),
        (("add", "docs", "--attribute", "path=x"), "is set by this command"),
        (("add", "docs", "--chunk-tokens", "50"), "--chunk-tokens must be 100 to 4096"),
        (("add", "docs", "--overlap-tokens", "200"), "--overlap-tokens must be 0 to half"),
        (("ask", "x", "--filter", "{"), "--filter: is not JSON"),
        (("ask", "x", "--weights", "1"), "--weights '1': give two numbers"),
    ):
        assert main(["rag", *arguments, *nowhere]) == 2, arguments
        assert told in capsys.readouterr().err
    assert main(["rag", "ask", "x", *nowhere]) == 1
    assert "is `ridgeline serve smollm2-135m all-minilm-l6-v2` running there?" in capsys.readouterr().err


def test_each_kind_of_file_is_cut_its_own_way(files: Path) -> None:
    assert [one.name for one in found_files([Path("docs"), Path("coffee.txt"), Path("./coffee.txt")])] == [
        "docs/tea.md",
        "coffee.txt",
    ]
    with pytest.raises(OptionError, match="no such file"):
        found_files([Path("none")])
    kinds = {name: strategy_of(name, "kind", 250, 50)["type"] for name in ("a.md", "a.py", "a.txt", "a.pdf")}
    assert kinds == {"a.md": "markdown", "a.py": "code", "a.txt": "sentences", "a.pdf": "sentences"}
    assert strategy_of("a.md", "auto", 250, 50) == {"type": "auto"}
    assert strategy_of("a.md", "tokens", 100, 50)["type"] == "static"
