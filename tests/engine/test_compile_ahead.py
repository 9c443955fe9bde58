"""Kernels compiled by a process beside the engine's: the engine finds them, and the process ends with it.

In their own processes with kernels as they are compiled: elsewhere in the tests they are interpreted. No
GPU is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline.engine.start import compile_ahead as module
from ridgeline.engine.start.compile_ahead import CompilingProcesses
from tests.models.tiny_checkpoints import tiny_model
from tests.patience import PATIENCE_S

pytest.importorskip("triton", reason="triton is not installed; kernels cannot be compiled")

# Has the child compile, then looks with Triton's own functions for what it compiled, of each kernel here.
ENGINE = """
import json, logging, os, sys
from pathlib import Path
os.environ["RIDGELINE_ASSUME_CAPABILITY"] = "90"  # what stands for the engine here has no GPU
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature
from ridgeline.engine.start.compile_ahead import CompilingProcesses
from ridgeline.engine.run.cuda import warm as cuda_warm
from ridgeline.models.spec.read_spec import read_spec

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
wanted = dict(
    spec=read_spec(Path(sys.argv[1])), dtype=torch.bfloat16, max_rows=4, step_tokens=16, max_context=32,
    num_blocks=16,
)
assert CompilingProcesses(2).compile(wanted, [1, 4])
found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **more: found.append(cache_hit)
target = GPUTarget("cuda", 90, 32)
backend = CUDABackend(target)
later = []
dry_run = cuda_warm.StepDryRun(**wanted)
names = lambda launches: {launch.kernel.__module__.rpartition(".")[2] for launch in launches}
ready = cuda_warm.first_kernels(dry_run)  # the engine compiles these
first = {launch.variant for launch in ready}
for launch in cuda_warm.other_kernels(dry_run, [1, 4]):
    if launch.variant in first:
        continue
    kernel = launch.kernel
    options = {"debug": False, "instrumentation_mode": "", **launch.options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*launch.args, **options)
    options, *source = kernel._pack_args(backend, options, bound, specialization, rest)
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    triton.compile(kind(kernel, *source), target=target, options=options.__dict__)
    later.append(launch)
print(json.dumps({"found": found, "first": sorted(names(ready)), "later": sorted(names(later))}))
"""


def test_what_the_child_compiles_is_found_under_the_same_key(tmp_path: Path) -> None:
    tiny_model("qwen3").config.save_pretrained(tmp_path / "model")
    done = start(ENGINE, tmp_path / "model", tmp_path / "cache")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(answer["found"]) > 20
    assert all(answer["found"])
    assert {"gemm_stream", "decode_attention", "prefill_attention", "sampling"} <= set(answer["first"])
    assert {"decode_attention", "adjust_logits"} <= set(answer["later"])
    assert f"INFO {len(answer['found'])} kernels compiled ahead in" in done.stderr
    assert "WARNING" not in done.stderr


def start(script: str, *args: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(args[-1])
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, env=env, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done


# A parent that ends, without a word to its child, as soon as that has told its number.
PARENT = """
import os, pickle, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
)
child.stdin.write(pickle.dumps((os.getpid(), {}, [], 0, 1)))
child.stdin.close()
child.stdout.readline()
print(child.pid, flush=True)
os._exit(0)
"""
CHILD = """
import time
from ridgeline.engine.start import compile_ahead
def compile_for_ever(*task):
    print("begun", flush=True)
    time.sleep(600)
compile_ahead._compile = compile_for_ever
compile_ahead.main()
"""


def test_the_child_ends_when_its_parent_is_gone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT, CHILD],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    child = int(done.stdout)
    deadline = time.monotonic() + PATIENCE_S
    while running(child):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended, and not reaped yet


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (("/no/such/python",), "FileNotFoundError: "),
        ((sys.executable, "-c", "raise SystemExit(3)"), "the compiling process exited with status 3"),
        ((sys.executable, "-c", 'print(\'{"failure": "ValueError: odd"}\')'), "ValueError: odd"),
        ((sys.executable, "-c", ""), "the compiling process ended without an answer"),
    ],
)
def test_a_child_that_cannot_compile_is_a_line_in_the_log(
    program: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PROGRAM", program)
    processes = CompilingProcesses(1)
    assert not processes.compile({}, [])
    assert processes.urgent_done.is_set()  # a start does not wait for what will not come
    (record,) = caplog.records
    assert record.getMessage().startswith("could not compile kernels ahead: ")
    assert told in record.getMessage()


def test_kernels_that_do_not_compile_are_counted_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = {"kernels": 3, "seconds": 1.0, "errors": ["ValueError: no such instruction", "KeyError: 1"]}
    monkeypatch.setattr(module, "PROGRAM", (sys.executable, "-c", f"print({json.dumps(json.dumps(answer))})"))
    assert not CompilingProcesses(1).compile({}, [])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["could not compile 2 kernels ahead; the first error: ValueError: no such instruction"]
