"""The native library where it is not usually built: for 64-bit ARM under QEMU, and by clang. Minutes each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
TOOLS = Path(sys.prefix) / "bin"

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path = CHECKOUT) -> str:
    environment = os.environ | {"PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="needs g++-aarch64-linux-gnu and qemu-user",
)
def test_the_kernels_are_right_on_every_arm_instruction_set() -> None:
    shown = run("make", "test-arm", f"VENV={Path(sys.prefix)}")
    for isa in ("neon", "dotprod", "i8mm"):
        assert f"test_linear.{isa}" in shown


@pytest.mark.skipif(not shutil.which("clang++"), reason="needs clang++")
def test_clang_builds_kernels_that_are_right(tmp_path: Path) -> None:
    tests = ("test_linear", "test_attention", "test_rows")
    run(
        "cmake", "-G", "Ninja", "-S", CHECKOUT / "native", "-B", tmp_path,
        "-DRL_TESTS=ON", "-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_CXX_FLAGS=-Werror",
    )  # fmt: skip
    run("cmake", "--build", tmp_path, "--target", "ridgeline_native", *tests)
    shown = run(
        "ctest", "--test-dir", tmp_path, "--no-tests=error", "-R", "|".join(f"^{name}\\." for name in tests)
    )
    assert "test_linear.avx2" in shown or "test_linear.neon" in shown
