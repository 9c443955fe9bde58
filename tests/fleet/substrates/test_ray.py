"""RaySubstrate on a real Ray cluster, in its own network namespace. A cluster takes seconds to start."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
UNSHARE = ("unshare", "--user", "--map-root-user", "--net")


def why_not() -> str:
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: pip install '.[ray]'"
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], check=False).returncode:
        return "no network namespace can be made here: Ray would listen on every address"
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.mark.parametrize("scene", ["one_machine", "two_nodes", "whole_fleet"])
def test_replicas_on_ray(scene: str, smollm2_path: Path, tmp_path: Path) -> None:
    # Ray keeps sockets in its folder, whose path must be short, and a token in ~/.ray.
    with tempfile.TemporaryDirectory(prefix="rl", ignore_cleanup_errors=True) as folder:
        variables = os.environ | {"HOME": str(tmp_path), "RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*UNSHARE, sys.executable, "-m", "tests.fleet.substrates.ray_scenes", scene, str(smollm2_path)],
            env=variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("done\n")
