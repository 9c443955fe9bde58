"""The kernels compiled ahead are the ones that steps launch: dry runs against the steps of a real runner.

In a separate process with compiled kernels: elsewhere in the tests they are interpreted.
Launches are written down, not made, so no GPU is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny_checkpoints import tiny_model

pytest.importorskip("triton", reason="triton is not installed; kernels cannot be compiled")

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 0,
}

# Prints the kernels that a real runner launched and the dry_run did not: of the warm-up, and of a crowd.
COMPARISON = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
from ridgeline.engine.run.cuda import shared_rows
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.run.cuda.runner import CudaRunner
from ridgeline.engine.start.cuda_trial import cost_of_determinism
from ridgeline.engine.run.cuda.graphs import ladder
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler, SchedulerLimits
from ridgeline.engine.run.cuda import warm as cuda_warm
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.torch_weights import random_weights
from ridgeline.ops.cuda.recording import recorded

spec, deterministic = read_spec(Path(sys.argv[1])), sys.argv[2] == "deterministic"
stored = {"stored_experts": spec.weight_format == "mxfp4"}
blocks, running, tokens, context = 96, 8, 256, spec.max_context
sizes = ladder(running)
dry_run = cuda_warm.StepDryRun(
    spec, torch.bfloat16, sizes[-1], tokens, context, blocks, deterministic, **stored
)
first = {launch.variant for launch in cuda_warm.first_kernels(dry_run)}
others = first | {launch.variant for launch in cuda_warm.other_kernels(dry_run, sizes)}
heavy = [name for name in ("sympy", "torch._dynamo") if name in sys.modules]
runner = CudaRunner(
    spec=spec, weights=random_weights(spec, torch.bfloat16, **stored), max_context=context, num_blocks=blocks,
    block_size=16, max_running=running, step_tokens=tokens, deterministic=deterministic,
)
limits = SchedulerLimits(
    step_tokens=tokens, prefill_chunk=tokens, max_running=running, max_waiting=64, block_size=16,
    num_blocks=blocks, max_context=context, prefix_cache=False, eos_ids=(), model_salt="",
)

def serve(lengths, count, limits=limits, **params):
    core = EngineCore(Scheduler(limits), runner)
    for number, length in enumerate(lengths):
        wanted = SamplingParams(max_tokens=count, ignore_eos=True, **params)
        core.add(Request(f"{number}", [0] * length, wanted))
        core.step()
    while core.has_work:
        core.step()

def missing(known, *work, **params):
    launches = recorded(lambda: serve(*work, **params))
    assert launches
    return [launch.kernel.__name__ for launch in launches if launch.variant not in known]

words = []

def trial():
    words.append(cost_of_determinism(runner.decoder, 8, 200, context, True))

answer = {"trial": [], "shared": []}
if deterministic:
    fast = cuda_warm.StepDryRun(spec, torch.bfloat16, sizes[-1], tokens, context, blocks, **stored)
    known = {launch.variant for launch in cuda_warm.trial_kernels([dry_run, fast], 8, 200)}
    launches = recorded(trial)
    answer["trial"] = [launch.kernel.__name__ for launch in launches if launch.variant not in known]
    assert launches and "a prefill of 200 tokens" in words[0]

runner.graphs.is_loaded = cuda_warm.first_keys(tokens).__contains__
answer |= {"warm-up": missing(first, [8], 2, temperature=0.0), "heavy": heavy}
runner.graphs.is_loaded = lambda key: True
rows = len(runner._rows)
runner.drop_sequences()
answer["rows"] = [rows, len(runner._rows)]
answer["crowd"] = missing(others, [17, 100, 3, 1, 16, 40, 40], 3)
answer["filtered"] = missing(others, [17, 100], 3, top_p=0.9, logprobs=1, presence_penalty=0.5)
answer["biased"] = missing(others, [17, 100], 3, top_p=0.9, logit_bias={0: 1.0})
shared_rows.LEAST_SAVED_TOKENS = 256  # of short prompts
launched = []
for crowd in (4, 7):
    launches = recorded(lambda: serve([260] * crowd, 8, replace(limits, prefix_cache=True)))
    launched += [launch.kernel.__name__ for launch in launches]
    answer["shared"] += [launch.kernel.__name__ for launch in launches if launch.variant not in others]
answer["prefixes"] = launched.count("_attend_prefix")
print(json.dumps(answer))
"""


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
@pytest.mark.parametrize("family", ["qwen3-128", "gemma3", "gpt-oss-mxfp4"])
def test_what_a_runner_launches_was_rehearsed(tmp_path: Path, family: str, mode: str) -> None:
    if family == "qwen3-128":
        (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    else:
        config = tiny_model(family).config
        config.max_position_embeddings = 512
        config.save_pretrained(tmp_path)
    if family == "gpt-oss-mxfp4":
        stated = json.loads((tmp_path / "config.json").read_text())
        stated["quantization_config"] = {"quant_method": "mxfp4"}
        (tmp_path / "config.json").write_text(json.dumps(stated))
    answer = run_python(COMPARISON, str(tmp_path), mode)
    assert answer["warm-up"] == []
    assert answer["crowd"] == []
    assert answer["trial"] == []
    assert answer["filtered"] == []
    assert answer["biased"] == []
    assert answer["shared"] == []
    assert (answer["prefixes"] > 0) is (mode == "fast")
    assert answer["heavy"] == []  # imports that would cost more than what they are for
    before, after = answer["rows"]
    assert before == 1
    assert after == 0


DRAWS = """
import json
import torch
from ridgeline.ops.cuda.recording import recorded
from ridgeline.ops.cuda.sampling.sampling import SampleScratch, draw
from ridgeline.ops.cuda.sampling.state import PLAIN, SamplerState

vocab, most = 151936, 512
state, scratch = SamplerState(most, vocab, "meta"), SampleScratch(most, vocab, "meta")
logits = torch.empty(most, vocab, dtype=torch.bfloat16, device="meta")
numbers = torch.empty(most, dtype=torch.int32, device="meta")

def drawn():
    for rows in range(1, most + 1):
        out = numbers[rows % 4 :]
        draw(logits[:rows], numbers, numbers, state, numbers, out, scratch, PLAIN)

print(json.dumps({"variants": len(recorded(drawn))}))
"""


def test_the_number_of_samples_changes_nothing_that_is_compiled() -> None:
    assert run_python(DRAWS) == {"variants": 1}


COMPILING = """
import json
from types import SimpleNamespace
from ridgeline.ops.cuda import recording

recording._device = lambda: 0
made = []

class Kernel:
    params = ()
    device_caches = {0: None}
    def __init__(self, fails): self.fails = fails
    def run(self, *args, grid, warmup, **options):
        if self.fails:
            raise ValueError("no such instruction")
        made.append(self)

kernels = [Kernel(fails=number % 3 == 0) for number in range(10)]
launches = [recording.Launch(kernel, (), {}) for kernel in kernels]
errors = recording.compile_all(launches, 4)
print(json.dumps({"made": len(made), "errors": len(errors)}))
"""


def test_kernels_that_do_not_compile_keep_none_of_the_others_from_it() -> None:
    assert run_python(COMPILING) == {"made": 6, "errors": 4}


LOADING = """
import json
import torch
from ridgeline.ops.cuda import recording

torch.cuda.is_initialized = lambda: True
seen = []

class Kernel:
    module = function = _run = None
    def _init_handles(self):
        self._run = "launcher"  # as Triton does: before the code is loaded
        seen.append([original.function, original._run])
        self.module = self.function = "code"
    def __setattr__(self, name, value):
        vars(self)[name] = value
        if self is original:
            seen.append([self.function, self._run])

class Unknown:
    pass

original = None
original = Kernel()
recording._load(original)
recording._load(Unknown())
recording._load(original)
print(json.dumps({"seen": seen}))
"""


def test_a_kernel_has_its_code_before_it_has_its_launcher() -> None:
    """Another thread may launch it in between."""
    assert run_python(LOADING) == {"seen": [[None, None], ["code", "launcher"]]}


def run_python(script: str, *args: str) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
