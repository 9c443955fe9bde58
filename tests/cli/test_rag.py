"""`ridgeline rag` against a real server with two models."""

from __future__ import annotations

import io
import itertools
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import EXIT_INTERRUPTED, main
from ridgeline.cli.rag import addition, progress
from ridgeline.cli.rag.files import found_files, strategy_of
from ridgeline.cli.rag.progress import counted
from ridgeline.options import OptionError
from ridgeline.retrieval.client import RequestFailed, VectorStoreClient
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


class Interrupted:
    """Counts the calls of a method of the client, and raises at one of them what stops the command."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, at: int = 0, error: BaseException | None = None
    ) -> None:
        self.returned: list[Any] = []
        method, lock, left = getattr(VectorStoreClient, name), threading.Lock(), itertools.count(1)

        def called(client: VectorStoreClient, *arguments: Any, **more: Any) -> Any:
            with lock:
                number = next(left)
            if number == at:
                raise error or KeyboardInterrupt
            made = method(client, *arguments, **more)
            with lock:
                self.returned.append(made)
            return made

        monkeypatch.setattr(VectorStoreClient, name, called)


def stored(server: LiveServer, store: str) -> dict[str, list[str]]:
    """The ids of the files in a store, by path."""
    client = VectorStoreClient(server.base_url)
    found = client.store(store)
    by_path: dict[str, list[str]] = {}
    for one in client.files(found["id"]) if found else ():
        by_path.setdefault(one["attributes"]["path"], []).append(one["id"])
    return by_path


def uploads(server: LiveServer) -> set[str]:
    with urllib.request.urlopen(f"{server.base_url}/v1/files?limit=10000") as answer:
        return {one["id"] for one in json.load(answer)["data"]}


def test_the_same_command_continues_a_run_that_was_stopped(
    server: LiveServer, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        (files / "docs" / f"{number}.txt").write_text(f"The secret of box {number} is {number * 7}.")
    command = ("add", "docs", "--store", "stopped")  # 13 files
    with monkeypatch.context() as patched:
        patched.setattr(addition, "BATCH", 3)
        first = Interrupted(patched, "upload", at=8)
        assert main(["rag", *command, "--url", server.base_url]) == EXIT_INTERRUPTED
    there = stored(server, "stopped")
    assert sorted(id for ids in there.values() for id in ids) == sorted(first.returned)
    assert len(there) >= 7
    with monkeypatch.context() as patched:
        second = Interrupted(patched, "upload")
        code, out, err = rag(server, capsys, *command)
    assert code == 0, err
    assert len(first.returned) + len(second.returned) == 13  # nothing was uploaded twice
    there = stored(server, "stopped")
    assert [len(ids) for ids in there.values()] == [1] * 13
    assert "files are searchable in 'stopped'" in out
    _, out, _ = rag(server, capsys, *command)
    assert out == "0 files are searchable in 'stopped'; 13 had not changed\n"
    rag(server, capsys, "remove", "stopped")
    assert uploads(server).isdisjoint([*first.returned, *second.returned])


def test_a_run_that_was_stopped_leaves_the_old_version_to_the_next(
    server: LiveServer, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("add", "coffee.txt", "--store", "versions")
    rag(server, capsys, *command)
    (old,) = stored(server, "versions")["coffee.txt"]
    (files / "coffee.txt").write_text(COFFEE + "Robusta is bitter.\n")
    with monkeypatch.context() as patched:
        Interrupted(patched, "remove", at=1)
        assert main(["rag", *command, "--url", server.base_url]) == EXIT_INTERRUPTED
    assert len(stored(server, "versions")["coffee.txt"]) == 2
    _, out, _ = rag(server, capsys, *command)
    assert out == "0 files are searchable in 'versions'; 1 had not changed\n"
    (new,) = stored(server, "versions")["coffee.txt"]
    assert new != old
    assert old not in uploads(server)

    (files / "coffee.txt").write_bytes(b"\xff\xfe\x00")  # no text any more: the last version stays
    code, out, err = rag(server, capsys, *command)
    assert (code, out) == (1, "0 files are searchable in 'versions'; 1 could not be read\n")
    assert err.startswith("coffee.txt: ")
    assert stored(server, "versions") == {"coffee.txt": [new]}
    rag(server, capsys, "remove", "versions")


def test_uploads_that_the_store_refuses_are_deleted(
    server: LiveServer, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = uploads(server)

    def refused(*asked: Any) -> list[str]:
        raise RequestFailed("the vectors belong to another model", 409)

    monkeypatch.setattr(VectorStoreClient, "add", refused)
    code, _, err = rag(server, capsys, "add", "docs", "coffee.txt", "--store", "refused")
    assert (code, err.splitlines()[-1]) == (1, "ridgeline: the vectors belong to another model")
    assert uploads(server) == before
    rag(server, capsys, "remove", "refused")


def test_a_new_store_may_keep_fewer_dimensions(
    server: LiveServer, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = rag(server, capsys, "add", "docs", "coffee.txt", "--store", "short", "--dimensions", "64")
    assert code == 0, err
    made = VectorStoreClient(server.base_url).store("short")
    assert made is not None
    assert made["dimensions"] == 64
    asked = ("ask", "Is black tea oxidised?", "--search-only", "--weights", "1,0", "--store", "short")
    assert "docs/tea.md" in rag(server, capsys, *asked)[1].splitlines()[0]
    for given, told in (("32", "keeps 64 dimensions"), ("64", "")):
        code, _, err = rag(server, capsys, "add", "docs", "--store", "short", "--dimensions", given)
        assert code == (2 if told else 0)
        assert told in err
    rag(server, capsys, "remove", "short")
    code, _, err = rag(server, capsys, "add", "docs", "--store", "none", "--dimensions", "385")
    assert code == 1
    assert "the vectors of all-minilm-l6-v2 have 384 numbers; got 385" in err


def test_a_long_file_moves_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, Any]] = [
        {"file_counts": {"total": 3, "in_progress": 2}},
        {
            "data": [
                {"filename": "a.txt", "progress": {"pieces_done": 3, "pieces_total": 6}},
                {"filename": "b.txt", "progress": None},
            ]
        },
        {"file_counts": {"total": 3, "in_progress": 0}},
    ]
    monkeypatch.setattr(VectorStoreClient, "_ask", lambda *asked, **more: answers.pop(0))
    reports: list[tuple[float, str]] = []
    client = VectorStoreClient("http://127.0.0.1:1")
    client.wait("vs_1", ["vsfb_1"], lambda done, work: reports.append((done, work)))
    assert reports == [(1.5, "a.txt: 3 of 6 pieces"), (3, "")]

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    for stream in (Terminal(), io.StringIO()):
        with counted(stream, "searchable", 3) as report:
            report(1.5, detail="a.txt: 3 of 6 pieces")
        assert "a.txt: 3 of 6 pieces" in stream.getvalue()
        assert re.search("1/3|1 of 3", stream.getvalue())


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
