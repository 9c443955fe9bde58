"""The checks of `tests/gpu` are found on a machine that has only what they name: no pytest, no grammars."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed; no check of the GPU engine can be found")

FIND = """
import sys

MISSING = ("pytest", "_pytest", "hypothesis", "llguidance")


class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(f"no module named {name}", name=name)


sys.meta_path.insert(0, Missing)
import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in MISSING else find_spec(name, *more)
from tests.gpu.collection import all_checks
from tests.engine.speculate.option_cases import NAMES

print(" ".join(all_checks()))
print(" ".join(NAMES))
"""


def test_all_are_found_and_speculation_covers_every_drafter():
    done = subprocess.run(
        [sys.executable, "-c", FIND],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    checks, options = (line.split() for line in done.stdout.splitlines()[-2:])
    for drafter in ("ngram", "suffix", "draft_model", "eagle3", "medusa", "mtp"):
        assert f"speculation.check_{drafter}_changes_no_token" in checks
        assert f"speculation.check_{drafter}_changes_no_bit_of_the_deterministic_mode" in checks
        assert f"speculation.check_{drafter}_changes_no_token_with_chunks_and_preemption" in checks
    assert {"paths", "determinism", "memory", "speculation"} <= {name.split(".")[0] for name in checks}
    assert "schema" not in options  # it needs llguidance
