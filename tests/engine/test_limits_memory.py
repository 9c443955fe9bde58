"""Telling the machine's limits at a start takes no memory worth the name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import re, sys
from pathlib import Path
from ridgeline.engine import limits
from ridgeline.engine.start.build import build_engine
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.start.native_build import NativeBuild

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def measured(build, real=NativeBuild.limits):
    before = peak_bytes()
    found = real(build)
    print(peak_bytes() - before, found.read_bytes_per_s)
    return found

limits.load_calibration = lambda machine: None
NativeBuild.limits = measured
build_engine(EngineConfig(kv_tokens=512), Path(sys.argv[1]))
"""


def test_the_bandwidth_is_measured_on_the_weights_that_are_there_already(smollm2_path: Path) -> None:
    """A buffer as large as the model would be the peak of a server that has little to do."""
    command = [sys.executable, "-c", PROGRAM, str(smollm2_path)]
    more, rate = subprocess.check_output(command, text=True, timeout=300).split()
    assert int(more) < smollm2_path.stat().st_size / 10
    assert float(rate) > 0
