"""Programs of a model run confined: no network, no writing, bounded in time, memory, files and processes."""

from __future__ import annotations

import socket

import pytest

from ridgeline.lab.evaluate import sandbox
from ridgeline.lab.evaluate.run import RunSettings, run_tasks
from ridgeline.lab.evaluate.sandbox import Limits, NotEnforced, run_program
from ridgeline.lab.evaluate.sandbox_child import mounts_in
from ridgeline.lab.evaluate.store import Head, ResultsFolder
from ridgeline.lab.evaluate.tasks.read import jsonl
from ridgeline.lab.evaluate.tasks.table import Task, load_task
from tests.lab.evaluate.scripted import ScriptedSubject


@pytest.fixture(scope="module", autouse=True)
def _confined():
    reason = sandbox.refusal()
    if reason:
        pytest.skip(reason)


def test_a_program_that_reaches_its_end_passes():
    assert run_program("assert sorted([2, 1]) == [1, 2]\nopen('own-file', 'w').write('x')").passed


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("import sys; sys.exit(0)", "ended before its last line"),
        ("import os; os._exit(0)", "ended before its last line"),
        ("def f(:", "SyntaxError"),
        ("import socket; socket.create_connection(('127.0.0.1', 1), 2)", "Network is unreachable"),
        ("open('/tmp/ridgeline-escape', 'w')", "Read-only file system"),
        ("x = 'a' * (2 << 30)", "MemoryError"),
        ("open('big', 'wb').write(b'0' * (3 << 20))", "File too large"),
        ("files = [open('f%d' % n, 'w') for n in range(60)]", "Too many open files"),
        (
            "import os, time\nfor n in range(30):\n    if not os.fork():\n        time.sleep(60)",
            "Resource temporarily unavailable",
        ),
        ("import ridgeline", "No module named 'ridgeline'"),
    ],
)
def test_what_a_program_may_not_do(program, reason):
    ran = run_program(program)
    assert not ran.passed
    assert reason in ran.reason, ran.reason


def test_a_program_without_end_is_ended():
    ran = run_program("import time\ntime.sleep(60)", Limits(wall_s=3.0))
    assert (ran.passed, ran.reason) == (False, "no end within 3 s")
    ran = run_program("while True: pass", Limits(cpu_s=1, wall_s=60.0))
    assert ran.reason.startswith("ended by signal")


def test_a_program_sees_no_environment_and_no_other_process(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THIS_TEST", "1")
    assert run_program(
        "import os\nassert os.getpid() < 5\nassert 'SECRET_OF_THIS_TEST' not in os.environ"
    ).passed


def test_a_program_reaches_no_socket_and_no_file_of_others(tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o644)
    place = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        tried = run_program(f"import socket\nsocket.socket(socket.AF_UNIX).connect({place!r})")
    assert "No such file" in tried.reason
    assert "No such file" in run_program(f"open({str(tmp_path / 'secret')!r})").reason
    assert "No such file" in run_program("open('/etc/passwd')").reason


def test_every_visible_folder_but_its_own_is_read_only():
    assert run_program(
        "import os\n"
        "for folder, _, _ in os.walk('/'):\n"
        "    if not folder.startswith('/work') and folder.count('/') < 4:\n"
        "        assert os.statvfs(folder).f_flag & os.ST_RDONLY, folder\n"
    ).passed


def test_mount_points_are_bytes(tmp_path):
    table = tmp_path / "mounts"
    table.write_bytes("tmpfs /a\\040b/é tmpfs rw,nosuid,relatime 0 0\n".encode())
    assert mounts_in(str(table)) == [("/a b/é".encode(), 2 | 1 << 21)]


def test_a_confinement_that_fails_is_no_wrong_program():
    with pytest.raises(NotEnforced, match="not enforced"):
        run_program("pass", Limits(open_files=1 << 40))
    assert not run_program("import os; os._exit(125)").passed  # the program cannot claim it


def test_the_end_is_not_written_in_the_program():
    program = (
        "import os\ntext = open(__file__).read()\nprint(text[-40:].split()[-1], flush=True)\nos._exit(0)"
    )
    assert run_program(program).reason == "ended before its last line"


def test_the_own_solutions_of_humaneval_pass_and_others_do_not(shared_data, tmp_path):
    task = load_task("humaneval", shared_data)
    lines = {line.text("task_id"): line for line in jsonl(shared_data / "humaneval" / "HumanEval.jsonl.gz")}
    some = Task(task.name, task.items[::41], task.primary)
    own = {item.prompt: lines[item.id].text("canonical_solution") for item in some.items}

    def passed(says, folder):
        subject = ScriptedSubject(lambda pair: 0.0, says=says)
        with ResultsFolder(tmp_path / folder, Head("scripted", "scripted")) as results:
            found = run_tasks(subject, [some], results, RunSettings(2), lambda *_: None)
        return [outcome.values["pass@1"] for outcome in found[task.name]]

    assert passed(own.__getitem__, "own") == [1.0] * len(some.items)
    assert passed(lambda prompt: "    return None\n", "other") == [0.0] * len(some.items)
