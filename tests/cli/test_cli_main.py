"""The command as a whole: quick help, one clear line per error, exit codes a script can rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ridgeline
from ridgeline.cli import models
from ridgeline.cli.main import build_parser, main
from ridgeline.models.errors import ModelNotFound
from tests.patience import PATIENCE_S

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "starlette",
    "uvicorn",
    "huggingface_hub",
    "rich",
    "msgspec",
    "tokenizers",
)


def modules_after(*words: str) -> set[str]:
    """The modules a fresh process has imported when the command is done."""
    code = (
        "import sys\nfrom ridgeline.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["serve", "--help"], ["models", "list"], ["ps"], ["completion", "bash"]],
)
def test_help_and_listing_import_nothing_heavy(words: list[str]) -> None:
    assert modules_after(*words).isdisjoint(HEAVY)


def test_inspecting_a_model_does_not_import_torch(smollm2_path: Path) -> None:
    assert "torch" not in modules_after("models", "inspect", str(smollm2_path))


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"ridgeline {ridgeline.__version__}"


def test_the_bare_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "ridgeline serve " in capsys.readouterr().out


def verb_helps() -> list[list[str]]:
    return [[verb] for verb in ("serve", "chat", "run", "models", "ps", "stop", "doctor", "bench")] + [
        *(["models", action] for action in ("list", "pull", "rm", "inspect")),
        *(["gateway", verb] for verb in ("keys", "teams", "usage", "routes")),
    ]


@pytest.mark.parametrize("words", verb_helps(), ids=" ".join)
def test_every_help_has_an_example_that_parses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    text = capsys.readouterr().out
    _, _, examples = text.partition("examples:")
    simple = [
        line.strip()
        for line in examples.splitlines()
        if line.strip().startswith("ridgeline ") and not set(line) & set("|<>\"'&")
    ]
    assert simple or words == ["run"]  # its examples all have quotes
    for line in simple:
        build_parser().parse_args(line.split()[1:])


def test_an_error_of_ours_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "inspect", "smolm2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ridgeline: no model is called 'smolm2'")


def test_wrong_usage_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "absent.toml")]) == 2
    assert "absent.toml: cannot be read" in capsys.readouterr().err
    assert main(["run", "--temperature", "300", "hello"]) == 2
    assert "temperature" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run", "--temprature", "1", "x"],
            "ridgeline run: unknown argument --temprature; did you mean --temp",
        ),
        (["serve", "--prot=9000"], "ridgeline serve: unknown argument --prot; did you mean --port?"),
        (
            ["models", "list", "--jsom"],
            "ridgeline models list: unknown argument --jsom; did you mean --json?",
        ),
        (["chat", "smollm2", "extra"], "ridgeline chat: unknown argument extra (see"),
        (
            ["run", "--temperature", "warm"],
            "ridgeline run: argument --temperature: 'warm' is not a number (see",
        ),
        (["modles"], "ridgeline: unknown verb 'modles'; did you mean `models`?"),
    ],
)
def test_a_wrong_argument_is_one_line_with_the_nearest_flag(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)
    assert line.endswith("--help`)")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound):
        main(["--debug", "models", "inspect", "nope"])
    monkeypatch.setenv("RIDGELINE_DEBUG", "1")
    with pytest.raises(ModelNotFound):
        main(["models", "inspect", "nope"])


def test_a_bug_is_called_a_bug_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*words: object, **more: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(models, "fetch", broken)
    assert main(["models", "pull", "smollm2-135m"]) == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in shown
    assert "--debug" in shown
    assert "Traceback" not in shown


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*words: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "fetch", interrupted)
    assert main(["models", "pull", "smollm2-135m"]) == 130


def test_a_reader_that_leaves_is_no_error_message() -> None:
    command = [sys.executable, "-m", "ridgeline.cli.main", "serve", "--print-config"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()  # before anything is written
    _, shown = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, shown) == (141, b"")


def test_serve_prints_its_config_with_file_and_flags_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ridgeline.toml"
    file.write_text('[engine]\nmodel = "gemma3-270m"\nkv_tokens = 4096\n[server]\nport = 9001\n')
    words = ["serve", "--config", str(file), "--port", "9002", "--no-prefix-cache", "--print-config"]
    assert main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert 'model = "gemma3-270m"' in shown  # from the file: no MODEL was given
    assert "kv_tokens = 4096" in shown
    assert "port = 9002" in shown  # the flag wins
    assert "prefix_cache = false" in shown
    assert main(["serve", "smollm2", *words[1:]]) == 0
    assert 'model = "smollm2"' in capsys.readouterr().out  # MODEL wins over the file


def test_a_missing_package_of_the_lab_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert main(["plan", "smollm2-135m", "--hardware", "h100", "--rate", "1", "--out", str(tmp_path)]) == 1
    assert "pip install 'ridgeline[lab]'" in capsys.readouterr().err
