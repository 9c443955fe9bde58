"""py-spy's samples: read, summed up, written for others, and refused in words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.profile.native_samples import HOST, WAITING, operator_of, operator_rows
from ridgeline.lab.profile.sampling import (
    Recording,
    Samples,
    family,
    read_stacks,
    refusal,
    speedscope,
    top_functions,
)
from ridgeline.lab.profile.work import OPERATORS, Work

RAW = """\
main (app.py:10);step (core.py:20);compute (core.py:31) 6
main (app.py:10);step (core.py:21) 3
main (app.py:12);step (core.py:20);compute (core.py:30) 1
not a stack
"""
BUSY = "def spinning_in_circles():\n  print(flush=True)\n  while True: pass\nspinning_in_circles()"


def test_functions_are_summed_over_their_lines() -> None:
    rows = top_functions(read_stacks(RAW))
    assert [row.name for row in rows] == ["compute (core.py)", "step (core.py)"]
    assert rows[0].self_share == pytest.approx(0.7)
    assert rows[1].self_share == pytest.approx(0.3)
    assert rows[1].total_share == pytest.approx(1.0)


def test_speedscope_gets_every_stack_with_its_weight() -> None:
    document = speedscope(read_stacks(RAW), "test")
    (profile,) = document["profiles"]
    names = [frame["name"] for frame in document["shared"]["frames"]]
    assert [names[i] for i in profile["samples"][0]] == [
        "main (app.py:10)",
        "step (core.py:20)",
        "compute (core.py:31)",
    ]
    assert sum(profile["weights"]) == profile["endValue"] == 10


@pytest.mark.usefixtures("py_spy")
def test_a_busy_process_is_found_in_its_function() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it spins
    try:
        samples = Recording(process.pid, 1).finish()
        assert family(process.pid) == {process.pid: "process"}
    finally:
        process.kill()
        process.wait()
    assert top_functions(samples)[0].name.startswith("spinning_in_circles")
    assert top_functions(samples)[0].self_share > 0.9


def test_a_process_that_is_not_there_is_refused_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(BadInput, match=f"no process {process.pid}"):
        Recording(process.pid, 1)


@pytest.mark.usefixtures("py_spy")
def test_a_process_without_python_is_an_error_in_one_line() -> None:
    process = subprocess.Popen(["sleep", "30"])
    try:
        with pytest.raises(LabError, match=f"could not sample process {process.pid}: .+") as caught:
            Recording(process.pid, 1).finish()
    finally:
        process.kill()
        process.wait()
    assert "\n" not in str(caught.value)


def test_missing_permission_says_what_gives_it() -> None:
    said = "Permission Denied: Try running again with elevated permissions by going 'sudo env …'"
    assert "SYS_PTRACE" in refusal(7, said)
    assert "ptrace_scope" in refusal(7, "Error: Operation not permitted (os error 1)")


RUN = "rl_step_execute (lib.so)", "ridgeline::ThreadPool::run (lib.so)"
PYTHON = "LLM._stream (llm.py:1)", "NativeDecoder._execute (library.py:2)"
EACH = (
    "ridgeline::(anonymous namespace)::Step::each_run<ridgeline::(anonymous namespace)::Step::{}(x)::lambda>"
)
CASES = {
    "attention": ("Step::attend (lib.so)", "attend_kv<1> (lib.so)", "chunk_values<1, 3, 4> (lib.so)"),
    "FFN: gate and up": (
        EACH.format("gated_mlp"),
        "panel_products (lib.so)",
        "quantized_tile<8, 3> (lib.so)",
    ),
    "qkv, output, FFN: down": (EACH.format("linear"), "panel_products (lib.so)"),
    "LM head": (EACH.format("predict"), "panel_products (lib.so)"),
    "norms, and inputs of linears": (EACH.format("linear"), "prepare_quantized (lib.so)"),
    "rope, KV write": ("Step::rotate_and_store (lib.so)", "store_key (lib.so)"),
    WAITING: (EACH.format("gated_mlp"), "ridgeline::Phase::nap (lib.so)", "clock_nanosleep (libc.so.6)"),
    "the rest of a step": ("rl_unpack (lib.so)",),
}


@pytest.mark.parametrize("operator", CASES)
def test_a_stack_within_a_step_tells_its_operator(operator: str) -> None:
    assert operator_of((*PYTHON, *RUN, *CASES[operator])) == operator


def test_a_stack_outside_of_a_step_is_the_hosts() -> None:
    assert operator_of((*PYTHON[:1], "Scheduler.schedule (scheduler.py:9)")) == HOST
    assert operator_of((*PYTHON[:1], "time.sleep (x.py:9)", "nanosleep (libc.so.6)")) == HOST


def test_shares_of_the_samples_are_shares_of_the_time() -> None:
    samples = Samples({(*PYTHON, *RUN, *CASES["LM head"]): 30, PYTHON: 70})
    work = {name: Work(2e9, 4e9) for name in OPERATORS}
    host, head = operator_rows(samples, 10.0, work)
    assert (host.name, host.seconds, host.work) == (HOST, pytest.approx(7.0), None)
    assert head.seconds == pytest.approx(3.0)
    assert head.bytes_per_s == pytest.approx(2e9 / 3)
    assert head.flops_per_s == pytest.approx(4e9 / 3)
