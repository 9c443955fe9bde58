"""Sampling other processes needs a permission that not every machine gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ridgeline.lab.errors import LabError
from ridgeline.lab.profile.sampling import Recording


@pytest.fixture(scope="session")
def py_spy() -> None:
    """Skips if this machine does not allow reading other processes."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # it runs
    try:
        Recording(process.pid, 1).finish()
    except LabError as error:
        if "PTRACE" not in str(error).upper():
            raise
        pytest.skip(str(error))
    finally:
        process.kill()
        process.wait()
