"""`ridgeline run`: the prompt from arguments and pipes, the answer alone on stdout."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.cli import run as run_module
from ridgeline.cli.answers import AnswerStats, Message, Piece
from ridgeline.cli.main import main
from ridgeline.cli.run import read_prompt, take_model
from ridgeline.cli.sampling import Sampling
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.models.errors import TemplateError
from ridgeline.options import OptionError

STATS = AnswerStats(
    prompt_tokens=33,
    cached_tokens=16,
    output_tokens=5,
    ttft_s=0.05,
    decode_s=0.1,
    e2e_s=0.2,
    finish_reason="stop",
)


class FixedAnswers:
    """Answers with what it was given, and remembers what it was asked."""

    model = "fixed"

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.asked: list[object] = []

    def chat(self, messages: list[Message], sampling: Sampling) -> Iterator[Piece]:
        self.asked.append(messages)
        return self._pieces()

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[Piece]:
        self.asked.append(prompt)
        return self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        yield from map(Piece, self.texts)
        yield Piece("", STATS)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> FixedAnswers:
    fixed = FixedAnswers("Nile, ", "Rhine")
    monkeypatch.setattr(run_module, "open_answers", lambda args: fixed)
    return fixed


def test_stdout_has_the_answer_and_one_line_end_and_nothing_else(
    answers: FixedAnswers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "Name two rivers"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Nile, Rhine\n"
    assert shown.err == ""  # stderr is not a terminal here
    assert answers.asked == [[{"role": "user", "content": "Name two rivers"}]]


def test_an_answer_that_ends_its_line_gets_no_second_line_end(
    answers: FixedAnswers, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.texts = ("a\n",)
    main(["run", "x"])
    assert capsys.readouterr().out == "a\n"


def test_figures_go_to_stderr_when_asked_for(
    answers: FixedAnswers, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "--stats", "x"])
    shown = capsys.readouterr()
    assert shown.out == "Nile, Rhine\n"
    assert shown.err == "TTFT 50 ms · 40.0 tok/s · 5 tokens · prompt 33 (16 cached) · stop\n"


def test_json_is_one_object_with_text_and_figures(
    answers: FixedAnswers, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "--json", "x"])
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["text"], result["finish_reason"]) == ("fixed", "Nile, Rhine", "stop")
    assert result["stats"]["ttft_ms"] == 50.0
    assert result["stats"]["tokens_per_s"] == 40.0


def test_raw_completes_the_text_and_system_does_not_go_with_it(
    answers: FixedAnswers, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "--raw", "Once"])
    assert answers.asked == ["Once"]
    assert main(["run", "--raw", "--system", "s", "Once"]) == 2
    assert "--raw" in capsys.readouterr().err


def test_a_system_message_comes_first(answers: FixedAnswers) -> None:
    main(["run", "--system", "Be brief", "x"])
    assert answers.asked == [[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "x"}]]


def test_the_prompt_is_arguments_a_pipe_or_both() -> None:
    assert read_prompt(["a", "b"], Terminal()) == "a\nb"
    assert read_prompt([], io.StringIO("piped\n")) == "piped"
    assert read_prompt(["-"], io.StringIO("piped\n\n")) == "piped\n"  # only the last line end is echo's
    assert read_prompt(["Summarize:", "-"], io.StringIO("text")) == "Summarize:\ntext"


def test_a_prompt_that_is_not_there_is_said_and_not_waited_for() -> None:
    with pytest.raises(OptionError, match="no prompt"):
        read_prompt([], Terminal())
    with pytest.raises(OptionError, match="empty"):
        read_prompt(["-"], io.StringIO("\n"))
    with pytest.raises(OptionError, match="only once"):
        read_prompt(["-", "-"], io.StringIO("x"))


def test_a_model_before_the_prompt_is_the_model(
    answers: FixedAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(run_module, "open_answers", lambda args: asked.append(args.model) or answers)
    main(["run", "smollm2", "Name two rivers"])
    main(["run", "Name two rivers"])
    main(["run", "Translate:", "text"])
    main(["run", "-m", "gemma3", "smollm2", "is what?"])
    assert asked == ["smollm2", None, None, "gemma3"]
    assert [messages[0]["content"] for messages in answers.asked] == [  # type: ignore[index]
        *("Name two rivers", "Name two rivers", "Translate:\ntext", "smollm2\nis what?")
    ]


@pytest.mark.parametrize(
    "word",
    [
        *("smollm2-135m", "SmolLM2", "smolm2", "llama3", "qwen3:8b", "gpt-oss-20b", "mistral", "org/name"),
        *("hf:org/name", "model.gguf", "./folder", "Llama-3.1-8B"),
    ],
)
def test_a_word_written_like_a_model_is_a_model(word: str) -> None:
    parts = [word, "hello"]
    assert (take_model(parts), parts) == (word, ["hello"])


@pytest.mark.parametrize(
    "word", ["Summarize:", "hello", "Name three rivers", "-", "42", "What is 2+2?", "a/b/c", ""]
)
def test_a_word_of_a_prompt_is_none(word: str) -> None:
    parts = [word, "hello"]
    assert (take_model(parts), parts) == ("", [word, "hello"])


@pytest.mark.parametrize("word", ["gpt-oss:20b", "mistral-nemo", "deepseek-coder", "codellama", "phi:latest"])
def test_names_of_other_tools_models_are_models(word: str) -> None:
    assert take_model([word, "hello"]) == word


@pytest.mark.parametrize("word", ["yes/no", "24/7", "TCP/IP", "sha256", "covid-19", "minimal", "mini"])
def test_one_word_alone_is_a_prompt_unless_it_names_a_family(word: str) -> None:
    assert take_model([word]) == ""
    assert take_model(["llama3"]) == "llama3"


def test_a_model_without_a_prompt_is_not_the_prompt(
    answers: FixedAnswers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["run", "smollm2"]) == 2
    assert "no prompt for the model smollm2" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert main(["run", "smollm2"]) == 0
    assert answers.asked == [[{"role": "user", "content": "piped"}]]


def test_an_unknown_model_before_the_prompt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "llama3", "hello"]) == 1
    said = capsys.readouterr().err
    assert "no model is called 'llama3'" in said
    assert "If 'llama3' belongs to the prompt, name the model with --model" in said


def test_sampling_flags_reach_the_engine_and_the_wire_alike() -> None:
    sampling = Sampling(max_tokens=5, temperature=0.0, stop=("a", "b"), seed=7)
    model = SamplingParams(temperature=0.7, top_p=0.95)
    assert sampling.params(model) == SamplingParams(
        max_tokens=5, temperature=0.0, top_p=0.95, stop=("a", "b"), seed=7
    )
    body = sampling.body()
    assert (body["temperature"], "top_p" in body) == (0.0, False)
    assert (body["max_tokens"], body["stop"], body["seed"]) == (5, ["a", "b"], 7)
    assert "seed" not in Sampling().body()
    assert "stop" not in Sampling().body()
    json.dumps(body)


def test_a_model_without_a_template_is_told_of_raw(
    answers: FixedAnswers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_template(messages: list[Message], sampling: Sampling) -> Iterator[Piece]:
        raise TemplateError("this model has no chat template")

    monkeypatch.setattr(answers, "chat", no_template)
    assert main(["run", "x"]) == 1
    assert "ridgeline run --raw" in capsys.readouterr().err


def test_the_real_model_answers_through_a_pipe(smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "ridgeline.cli.main", "run", "--temperature", "0", "--max-tokens", "4"]
    done = subprocess.run(
        [*command, "--kv-tokens", "1024", "--threads", "1", "--raw", "--json"],
        input="The capital of France is\n",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert "Paris" in result["text"]
    assert result["stats"]["tokens_per_s_limit"] > 0  # measured by the engine at its start
