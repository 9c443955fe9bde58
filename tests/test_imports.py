"""Which packages need which libraries, checked by taking the others away in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRONT_PACKAGES = (
    "msgspec",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "rich",
    "huggingface_hub",
    "httptools",
    "uvloop",
)
SPEAK_MSGPACK = {
    f"ridgeline.engine.{name}" for name in ("messages", "transport", "process", "client", "launch")
}

BLOCK = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FRONT_PACKAGES!r}:
            raise ModuleNotFoundError(f"{{name}} is taken away by this test", name=name)

sys.meta_path.insert(0, Blocker())
"""

IMPORT_EVERYTHING = f"""
import importlib, pkgutil

for package in ("ops", "models", "engine", "telemetry"):
    package = importlib.import_module("ridgeline." + package)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in {SPEAK_MSGPACK!r}:
            importlib.import_module(module.name)
            print(module.name)
"""


def run(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_engine_models_ops_and_telemetry_import_without_the_fronts_packages():
    imported = run(BLOCK + IMPORT_EVERYTHING).split()
    assert {"ridgeline.engine.llm", "ridgeline.models.decoder", "ridgeline.telemetry.metrics"} <= set(
        imported
    )


def test_only_the_modules_that_speak_msgpack_need_msgspec():
    """If one of them no longer does, it leaves the list above."""
    for module in SPEAK_MSGPACK:
        with pytest.raises(AssertionError, match="msgspec is taken away"):
            run(BLOCK + f"import {module}")


def test_the_python_api_generates_without_the_fronts_packages(smollm2_path):
    program = f"""
from ridgeline import LLM, SamplingParams
llm = LLM({str(smollm2_path)!r}, kv_tokens=1024)
generation = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=4))[0]
print(len(generation.completions[0].tokens), generation.text)
"""
    assert run(BLOCK + program).startswith("4  Paris.")


@pytest.mark.parametrize("module", ["ridgeline.server.main", "ridgeline.engine.client", "ridgeline.cli.main"])
def test_the_front_imports_no_torch(module):
    """Tensors never enter it; importing torch would cost it seconds and hundreds of megabytes."""
    heavy = run(f"import sys, {module}; print(*sorted(sys.modules.keys() & {{'torch', 'transformers'}}))")
    assert heavy.split() == []
