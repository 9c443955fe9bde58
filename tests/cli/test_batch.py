"""`ridgeline batch`: a file of requests becomes a file of answers, and goes on where it was stopped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.batch import summary
from ridgeline.cli.main import main
from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY
from ridgeline.server.batches.answering import LineSender
from ridgeline.server.batches.inner import Reply
from ridgeline.server.batches.offline import (
    BadInput,
    Figures,
    OfflineBatch,
    OutputFile,
    check_lines,
    prepared_lines,
)
from tests.conftest import LiveServer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def whole_line(number: int, **body: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}


class Answering:
    """Answers with the number of the call, and remembers the bodies."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, path: str, body: bytes, request_id: str) -> Reply:
        self.bodies.append(json.loads(body))
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
        return Reply(self.status, {}, bytearray(json.dumps({"usage": usage}).encode()))


def answer(source: Path, target: Path, post: Answering, in_flight: int = 4) -> Figures:
    async def run() -> Figures:
        output = OutputFile(target)
        try:
            return await OfflineBatch(LineSender(post), output, in_flight).run(prepared_lines(source, None))
        finally:
            output.close()

    check_lines(source)
    return asyncio.run(run())


class TestFiles:
    def test_lines_of_either_format_are_asked(self, tmp_path: Path) -> None:
        source = write(
            tmp_path / "in",
            whole_line(1, max_tokens=3),
            {"messages": MESSAGES},
            "",
            {"prompt": "a", "max_tokens": 1},
        )
        figures = answer(source, tmp_path / "out", Answering())
        assert (figures.answered, figures.prompt_tokens, figures.output_tokens) == (3, 15, 6)
        assert sorted(one["custom_id"] for one in read(tmp_path / "out")) == ["c1", "line-2", "line-4"]
        assert [line.url for line in prepared_lines(source, None)] == [CHAT, CHAT, "/v1/completions"]

    def test_what_is_answered_is_not_asked_again(self, tmp_path: Path) -> None:
        source = write(tmp_path / "in", *(whole_line(i) for i in range(6)))
        target = write(tmp_path / "out", {"custom_id": "c1"}, {"custom_id": "c4"})
        post = Answering()
        assert answer(source, target, post).answered == 4
        assert len(post.bodies) == 4
        assert sorted(one["custom_id"] for one in read(target)) == [f"c{i}" for i in range(6)]

    def test_a_line_cut_in_the_middle_is_asked_again(self, tmp_path: Path) -> None:
        source = write(tmp_path / "in", *(whole_line(i) for i in range(3)))
        target = tmp_path / "out"
        target.write_text('{"custom_id": "c0"}\n{"custom_id": "c1"}')  # killed before the line end
        answer(source, target, Answering())
        assert sorted(one["custom_id"] for one in read(target)) == ["c0", "c1", "c2"]

    def test_a_file_that_is_no_output_is_left_alone(self, tmp_path: Path) -> None:
        source = write(tmp_path / "in", whole_line(0))
        target = write(tmp_path / "notes.txt", "my notes")
        with pytest.raises(BadInput, match="not the output of a batch"):
            answer(source, target, Answering())
        assert target.read_text() == "my notes\n"

    def test_a_refused_line_is_an_answer_too(self, tmp_path: Path) -> None:
        figures = answer(write(tmp_path / "in", whole_line(0)), tmp_path / "out", Answering(400))
        assert (figures.failed, read(tmp_path / "out")[0]["response"]["status_code"]) == (1, 400)

    @pytest.mark.parametrize(
        ("lines", "says"),
        [
            (["{nothing"], "line 1: not a JSON object"),
            ([whole_line(1), whole_line(1)], "line 2: the custom_id 'c1' is also that of line 1"),
            ([{"custom_id": "a", "method": "POST"}], "line 1: Object missing required field"),
            ([whole_line(1, stream=True)], "remove stream"),
            ([[1, 2]], "not a JSON object"),
            ([], "has no lines"),
            (["x"] * 9, "and 4 more"),
        ],
    )
    def test_a_wrong_input_is_refused_before_anything_is_asked(
        self, tmp_path: Path, lines: list[Any], says: str
    ) -> None:
        with pytest.raises(BadInput, match=says):
            check_lines(write(tmp_path / "in", *lines))

    def test_figures_stand_beside_the_limit(self) -> None:
        figures = Figures(answered=9, failed=1, prompt_tokens=500, cached_tokens=100, output_tokens=600)
        line = summary(figures, 2.0, {"prefill_tokens_per_s": 1000.0})
        assert "10 lines in 2.0 s (5.0/s) · 1 failed" in line
        assert "500 tok/s computed (50% of this machine's limit, 1000)" in line


class TestVerb:
    def test_a_running_server_is_asked_in_the_background(
        self, live_server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write(
            tmp_path / "in",
            *({"prompt": f"{i} is", "max_tokens": 2} for i in range(4)),
            whole_line(9, max_tokens=2, model="of somebody else"),
        )
        arguments = ["batch", str(source), str(tmp_path / "out"), "--url", live_server.base_url]
        assert main([*arguments, "--model", "smollm2-135m"]) == 0
        assert len(read(tmp_path / "out")) == 5
        assert "5 lines in" in capsys.readouterr().err
        assert main(arguments) == 0
        assert "5 of 5 lines are already answered" in capsys.readouterr().err

    def test_an_engine_of_its_own_answers(
        self, smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write(
            tmp_path / "in",
            *({"prompt": f"{i} is", "max_tokens": 2} for i in range(3)),
            {"prompt": "x", "max_tokens": "many"},
        )
        assert main(["batch", str(source), str(tmp_path / "out"), "--kv-tokens", "4096"]) == 1
        codes = sorted(one["response"]["status_code"] for one in read(tmp_path / "out"))
        assert codes == [200, 200, 200, 400]
        assert "of this machine's limit" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["nowhere.jsonl", "out"], "nowhere.jsonl: No such file"),
            (["in", "out", "--in-flight", "0"], "--in-flight must be at least 1"),
            (
                ["in", "out", "--url", "http://x", "--kv-tokens", "9"],
                "--kv-tokens is a setting of the engine",
            ),
            (["in", "out", "--url", "http://127.0.0.1:9"], "is `ridgeline serve` running there"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_line(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        says: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write(tmp_path / "in", {"prompt": "a"})
        assert main(["batch", *arguments]) in (1, 2)
        assert says in capsys.readouterr().err


def test_with_a_url_bodies_ask_for_the_background(tmp_path: Path) -> None:
    from argparse import Namespace

    from ridgeline.cli.batch import _change

    source = write(tmp_path / "in", whole_line(0, model="x"), {"prompt": "a", "priority": 3})
    change = _change(Namespace(url="http://x", model=None))
    bodies = [json.loads(line.body) for line in prepared_lines(source, change)]
    assert [body["priority"] for body in bodies] == [BACKGROUND_PRIORITY, 3]
    assert bodies[0]["model"] == "x"
