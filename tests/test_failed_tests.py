"""Which failures `.ci/run` tries once more: tools/failed_tests.py in runs of real pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNSTABLE = """
import pathlib, pytest

@pytest.mark.parametrize("word", ["a - b", "[c]", "d"])
def test_by_chance(word):
    seen = pathlib.Path(__file__).with_name(word)
    if word != "d" and not seen.exists():
        seen.touch()
        raise AssertionError("the first run")
"""


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-p",
        "tools.failed_tests",
        *map(str, arguments),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """The file of failed tests; what an earlier run left in it must not count."""
    (tmp_path / "pytest.ini").touch()
    path = tmp_path / "failed"
    path.write_text("tests/test_of_an_earlier_run.py\n")
    return path


def test_tests_that_failed_by_chance_pass_in_a_second_run_of_these_alone(
    tmp_path: Path, failed: Path
) -> None:
    (tmp_path / "test_one.py").write_text(UNSTABLE)
    first = run(tmp_path, "-n", "2", "--failed-to", failed)
    assert first.returncode == 1, first.stdout
    assert "2 failed, 1 passed" in first.stdout
    assert "AssertionError: the first run" in first.stdout
    again = run(tmp_path, "-n", "0", f"@{failed}")
    assert "2 passed in" in again.stdout
    assert again.returncode == 0


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_one(n): assert 0", 1),
        ("import no_such_module\ndef test_one(): pass", 2),
        ("def test_one(): assert 0\ndef test_two(): raise KeyboardInterrupt", 2),
        ("def test_one(): pass", 0),
    ],
    ids=["four tests failed", "a file without its imports", "interrupted", "all passed"],
)
def test_other_ends_of_a_run_are_final(tmp_path: Path, failed: Path, text: str, status: int) -> None:
    (tmp_path / "test_one.py").write_text(text)
    done = run(tmp_path, "--failed-to", failed)
    assert done.returncode == status, done.stdout
    assert not failed.exists()


def test_a_test_that_ends_its_process_is_final(tmp_path: Path, failed: Path) -> None:
    (tmp_path / "test_one.py").write_text("import os\ndef test_one(): os.abort()")
    done = run(tmp_path, "-n", "1", "--failed-to", failed)
    assert "crashed while running" in done.stdout
    assert done.returncode == 1
    assert not failed.exists()
