"""What `make` shows while it installs and compiles: tools/stage.py around real ninja and pip."""

from __future__ import annotations

import os
import pty
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import tiny_wheel

STAGE = Path(__file__).parents[1] / "tools/stage.py"
SCRIPTS = Path(sysconfig.get_path("scripts"))
RULE = "rule {name}\n  command = {command}\n  description = Building $out\n"


def stage(title: str, *command: object, **settings: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(STAGE), title, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, **settings)  # type: ignore[call-overload,no-any-return]


def ninja(folder: Path, **commands: str) -> list[object]:
    """A build with one step for each command; its program and arguments."""
    program = SCRIPTS / "ninja"
    if not program.exists():
        pytest.skip("ninja is installed by make")
    text = "".join(RULE.format(name=name, command=command) for name, command in commands.items())
    text += "".join(f"build {name}.o: {name}\n" for name in commands)
    (folder / "build.ninja").write_text(text)
    return [program, "-C", folder, "-j1"]


def test_a_build_in_a_log_has_a_first_and_a_last_line(tmp_path: Path) -> None:
    done = stage("compiling", *ninja(tmp_path, one="touch one.o", two="touch two.o"))
    assert done.returncode == 0
    first, *_, last = done.stdout.splitlines()
    assert first == "make: compiling"
    assert re.fullmatch(r"make: compiling: done in \d+ s", last)


def test_nothing_to_build_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [str(word) for word in ninja(tmp_path, one="touch one.o")]
    program = runpy.run_path(str(STAGE))
    monkeypatch.setitem(program["main"].__globals__, "QUIET_SECONDS", 600)  # however slow this machine is
    for shown in ("make: compiling", ""):
        assert program["main"]("compiling", *command) == 0
        assert capfd.readouterr().out.partition("\n")[0] == shown


def test_a_build_on_a_terminal_counts_its_steps_on_one_line(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, STAGE, "compiling", *ninja(tmp_path, one="touch one.o", two="touch two.o")]
    with subprocess.Popen(map(str, words), stdout=theirs, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    assert process.returncode == 0
    assert shown.count(b"\n") == 1
    for line in (r"compiling … \d+ s: 1/2", r"compiling … \d+ s: 2/2", r"compiling: done in \d+ s"):
        assert re.search(line, shown.decode())


def test_a_compilers_warning_is_shown_and_the_steps_are_not(tmp_path: Path) -> None:
    done = stage("compiling", *ninja(tmp_path, one="echo 'x.cpp:1: warning: unused' && touch one.o"))
    assert re.search(r": done in \d+ s\nx.cpp:1: warning: unused\n$", done.stdout)
    assert "Building" not in done.stdout


def test_a_failure_shows_all_that_was_written_and_keeps_the_exit_status(tmp_path: Path) -> None:
    done = stage("compiling", *ninja(tmp_path, one="touch one.o", two="echo 'x.cpp:1: error: no' && exit 3"))
    assert done.returncode != 0
    assert "make: compiling: 2/2: failed after" in done.stdout
    assert "x.cpp:1: error: no" in done.stdout
    assert stage("running", sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def test_a_program_that_is_missing_is_named() -> None:
    done = stage("compiling", "/no/such/program")
    assert done.returncode == 1
    assert done.stderr.strip() == "make: /no/such/program: No such file or directory"


def test_an_installation_counts_its_packages(tmp_path: Path) -> None:
    tiny_wheel.build_wheel(tmp_path, 1, b"one")
    tiny_wheel.build_wheel(tmp_path, 2, b"two")
    options = ["--no-index", "--find-links", tmp_path, "--target", tmp_path / "installed"]
    done = stage("installing", SCRIPTS / "pip", "install", *options, "tinymodel-part1", "tinymodel-part2")
    assert done.returncode == 0, done.stdout
    first, *between, last = done.stdout.splitlines()
    assert first == "make: installing"
    assert last.startswith("make: installing: 2 packages: done in ")
    assert all(line.startswith("make: installing … ") for line in between)  # one every 15 seconds
