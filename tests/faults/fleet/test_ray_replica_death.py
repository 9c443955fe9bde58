"""SIGKILL of replicas under streams on Ray: no stream is lost, and none changes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fleet.substrates.test_ray import ROOT, UNSHARE, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


def test_no_stream_is_lost_and_none_changes_when_a_replica_on_ray_is_killed(
    smollm2_path: Path, tmp_path: Path
) -> None:
    # Ray keeps sockets in its folder, whose path must be short, and a token in ~/.ray.
    with tempfile.TemporaryDirectory(prefix="rl", ignore_cleanup_errors=True) as folder:
        variables = os.environ | {"HOME": str(tmp_path), "RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.faults.fleet.ray_death", str(smollm2_path), folder]
        done = subprocess.run(
            [*UNSHARE, *command],
            env=variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("killed ") == 2
    assert done.stdout.endswith("done\n")
