"""The engine process keeps numpy's BLAS from starting threads, and nothing else from using its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MANY = "4"
COUNT = (
    "import os, {module}; print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"
)


def threads_and_variable(module: str, **environment: str) -> list[str]:
    inherited = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    program = [sys.executable, "-c", COUNT.format(module=module)]
    return subprocess.check_output(program, env=inherited | environment, text=True).split()


def test_the_engine_process_starts_no_blas_threads_and_leaves_the_setting_to_others() -> None:
    assert threads_and_variable("ridgeline.engine.run.engine_loop") == ["1", "None"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenBLAS starts no threads on a single CPU")
def test_without_the_module_there_would_be_threads() -> None:
    """If this fails, numpy no longer needs it."""
    assert int(threads_and_variable("numpy")[0]) > 1


def test_what_the_user_has_set_stays() -> None:
    threads, variable = threads_and_variable("ridgeline.engine.run.engine_loop", OPENBLAS_NUM_THREADS=MANY)
    assert variable == MANY
    assert int(threads) == min(int(MANY), len(os.sched_getaffinity(0)))
