"""`ridgeline completion`: a real bash completes with the script; all scripts have every command and flag."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.cli.flags.command_tree import Command, commands
from ridgeline.cli.flags.shells import SHELLS
from ridgeline.cli.main import VERBS, build_parser
from tests.patience import PATIENCE_S

MODELS = ["smollm2-135m", "gemma3-270m"]
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture(scope="module")
def tree() -> list[Command]:
    return list(commands(build_parser()))


@pytest.fixture
def script(tree: list[Command], tmp_path: Path) -> Path:
    path = tmp_path / "completion.bash"
    path.write_text(SHELLS["bash"](tree, MODELS))
    return path


class Bash:
    """An interactive bash on its own terminal."""

    def __init__(self, script: Path) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(script.parent)
            os.environ.update({"PS1": "$ ", "TERM": "dumb"})
            os.execlp("bash", "bash", "--norc", "--noprofile", "-i")
        self.type(f"source {script}; echo load''ed\n")
        self.read_until("loaded")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def read_until(self, mark: str, timeout_s: float = PATIENCE_S) -> str:
        text, deadline = "", time.monotonic() + timeout_s
        while mark not in text:
            left = deadline - time.monotonic()
            assert left > 0, f"no {mark!r} in {text!r}"
            if select.select([self.terminal], [], [], left)[0]:
                text += os.read(self.terminal, 4096).decode(errors="replace")
        return text

    def completed(self, line: str) -> str:
        """The line after one TAB: Ctrl-A and `echo` turn it into output."""
        self.type(f"{line}\t\x01echo 'o''ut:' \n")
        text = self.read_until("out: ")
        while "\n" not in text.partition("out: ")[2]:
            text += os.read(self.terminal, 4096).decode(errors="replace")
        return text.partition("out: ")[2].splitlines()[0].strip()


@pytest.fixture
def bash(script: Path) -> Iterator[Bash]:
    shell = Bash(script)
    yield shell
    shell.type("\x15exit\n")
    os.close(shell.terminal)
    os.waitpid(shell.pid, 0)


@needs_bash
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("ridgeline serv", "ridgeline serve"),
        ("ridgeline gateway ke", "ridgeline gateway keys"),
        ("ridgeline gateway keys rev", "ridgeline gateway keys revoke"),
        ("ridgeline serve smol", "ridgeline serve smollm2-135m"),
        ("ridgeline serve --print-s", "ridgeline serve --print-schema"),
        ("ridgeline serve --backend na", "ridgeline serve --backend native"),
        ("ridgeline serve --backend=na", "ridgeline serve --backend=native"),
        ("ridgeline serve --config compl", "ridgeline serve --config completion.bash"),
        ("ridgeline serve --host comp", "ridgeline serve --host comp"),
        ("ridgeline bench sel", "ridgeline bench selftest"),
        ("ridgeline completion z", "ridgeline completion zsh"),
        ("ridgeline chat compl", "ridgeline chat completion.bash"),
    ],
)
def test_tab_in_a_real_bash(line: str, completed: str, bash: Bash) -> None:
    assert bash.completed(line) == completed


@needs_bash
def test_bash_offers_every_flag_of_a_command(script: Path, tree: list[Command]) -> None:
    (serve,) = [command for command in tree if command.name == "ridgeline serve"]
    code = (
        f"source {script}; COMP_WORDS=(ridgeline serve --); COMP_CWORD=2; _ridgeline; "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    offered = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(offered) == {s for flag in serve.flags for s in flag.strings if s.startswith("--")}
    assert {"--port", "--no-prefix-cache", "--kv-tokens"} <= set(offered)
    assert "--max-model-len" not in offered  # another tool's


def test_the_tree_has_every_verb_and_those_below(tree: list[Command]) -> None:
    names = {command.name for command in tree}
    assert {f"ridgeline {verb}" for verb in VERBS} <= names
    assert {"ridgeline gateway routes fit", "ridgeline models rm", "ridgeline plan verify"} <= names
    assert "ridgeline keys" not in names  # an old name


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_has_every_command_flag_and_choice(shell: str, tree: list[Command]) -> None:
    text = SHELLS[shell](tree, MODELS)
    for command in tree:
        assert command.name in text
        for flag in command.flags:
            long = [string[2:] for string in flag.strings if string.startswith("--")]
            assert all(name in text for name in long)
            assert " ".join(flag.choices) in text
    assert "smollm2-135m" in text


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_the_shell_can_read_its_script(shell: str, tree: list[Command], tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(SHELLS[shell](tree, MODELS))
    subprocess.run([shell, "-n", str(path)], check=True)
