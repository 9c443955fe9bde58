"""Every kernel that a step launches compiles for an H200, without one: in a separate process, because
Triton either interprets or compiles. Dry runs over tensors without memory find what the steps launch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SHARED_MEMORY = 227 << 10  # that one program may have

SMALL_SHARED_MEMORY = 99 << 10  # on GPUs of capability 8.6, 8.9 and 12.0

# Prints what became of each kernel: its name, shared memory, whether it uses tensor cores, and the error.
PROGRAM = """
import importlib, json, pkgutil, sys, traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature
from ridgeline.ops.cuda import dependent_launch
capability = int(sys.argv[2])
dependent_launch.PDL = capability >= 90  # as on the device; the other modules take it from here
import ridgeline.ops.cuda
from ridgeline.engine.run.cuda import warm as cuda_warm
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.ops.cuda.recording import distinct

target = GPUTarget("cuda", capability, 32)
backend = CUDABackend(target)

def compiled(launch):
    kernel = launch.kernel
    options = {"debug": False, "instrumentation_mode": "", **launch.options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*launch.args, **options)
    options, *source = kernel._pack_args(backend, options, bound, specialization, rest)
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(kind(kernel, *source), target=target, options=options.__dict__)

def outcome(launch):
    found = {"kernel": f"{launch.kernel.__module__}.{launch.kernel.__name__}"}
    found["early"] = bool(launch.options.get("launch_pdl"))
    try:
        result = compiled(launch)
        found["shared"] = result.metadata.shared
        found["tensor_cores"] = "mma" in result.asm["ptx"]
        found["waits"] = "griddepcontrol.wait" in result.asm["ptx"]
    except Exception:
        found["error"] = traceback.format_exc()[-1500:]
    return found

dry_run = cuda_warm.StepDryRun(
    read_spec(Path(sys.argv[1])), torch.bfloat16, 64, 4096, 4096, num_blocks=4096
)
launches = []
for rows in (1, 4, 16, 64):
    launches += dry_run.decodes(rows)
for lengths, decodes in (([8], 0), ([100, 30], 5), ([2048, 2048], 0)):
    launches += dry_run.prompts(lengths, decodes)
launches += dry_run.decodes(64, sharing=True) + dry_run.inputs() + dry_run.samples(1)
if sys.argv[3:]:  # kernels whose names hold a word, and not of every size
    launches = [*dry_run.decodes(1), *dry_run.decodes(64, sharing=True)]
    launches += dry_run.prompts([8]) + dry_run.prompts([2048, 2048])
    names = [f"{launch.kernel.__module__}.{launch.kernel.__name__}" for launch in launches]
    launches = [launch for launch, name in zip(launches, names) if sys.argv[3] in name]
with ThreadPoolExecutor(2) as pool:
    outcomes = list(pool.map(outcome, distinct(launches)))
arguments = {}
for module in pkgutil.walk_packages(ridgeline.ops.cuda.__path__, "ridgeline.ops.cuda."):
    for name, value in vars(importlib.import_module(module.name)).items():
        if isinstance(value, JITFunction):
            arguments[f"{value.__module__}.{name}"] = value.arg_names
print(json.dumps({"outcomes": outcomes, "arguments": arguments}))
"""
# Appended to PROGRAM up to its dry run: the kernels of MXFP4 experts of one token, of 64 and of 300.
STORED = """
from ridgeline.ops.cuda.experts.experts import experts
from ridgeline.ops.cuda.experts.scratch import experts_scratch
from ridgeline.ops.cuda.recording import recorded
from ridgeline.ops.mxfp4 import Mxfp4

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

def stored(rows, k):
    return Mxfp4(empty(32, rows, k // 8, dtype=torch.int32), empty(32, k // 32, rows, dtype=torch.uint8))

size, activation, clamp = json.loads(sys.argv[3])

def run():
    scratch = experts_scratch(300, 32, 4, size, size, torch.bfloat16, "meta")
    for tokens in (1, 64, 300):
        chosen, weights = empty(tokens, 4, dtype=torch.int32), empty(tokens, 4, dtype=torch.float32)
        x, out = empty(tokens, size), empty(tokens, size)
        experts(
            x, chosen, weights, stored(2 * size, size), stored(size, size), out, activation, scratch,
            clamp=clamp, gate_up_bias=empty(32, 2 * size), down_bias=empty(32, size),
        )

print(json.dumps({"outcomes": [outcome(launch) for launch in recorded(run)]}))
"""
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}

QWEN3_MOE = {
    **QWEN3_06B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return compiled(tmp_path_factory.mktemp("qwen3"), QWEN3_06B, 90)


def compiled(model: Path, config: dict[str, Any], capability: int, *only: str, **env: str) -> dict[str, Any]:
    """What PROGRAM prints of a model of this config."""
    (model / "config.json").write_text(json.dumps(config))
    return printed(PROGRAM, str(model), str(capability), *only, **env)


def printed(program: str, *arguments: str, **env: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=REPOSITORY,
        env=environment | env,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_all_that_a_step_launches_compiles(kernels):
    failures = [found for found in kernels["outcomes"] if "error" in found]
    assert not failures, "\n\n".join(f"{found['kernel']}\n{found['error']}" for found in failures)
    assert len(kernels["outcomes"]) > 20


def test_no_kernel_wants_more_shared_memory_than_there_is(kernels):
    assert all(found.get("shared", 0) <= SHARED_MEMORY for found in kernels["outcomes"])


def test_attention_of_wide_heads_fits_a_gpu_with_little_shared_memory(tmp_path):
    wide = {**QWEN3_06B, "head_dim": 256}
    found = compiled(tmp_path, wide, 89, "_attend", RIDGELINE_ASSUME_CAPABILITY="89")["outcomes"]
    assert [kernel["error"] for kernel in found if "error" in kernel] == []
    modules = {kernel["kernel"].split(".")[-2] for kernel in found}
    assert modules == {"decode_attention", "prefill_attention", "shared_prefix"}
    assert [kernel for kernel in found if kernel["shared"] > SMALL_SHARED_MEMORY] == []


def test_the_experts_of_a_mixture_compile(tmp_path):
    found = compiled(tmp_path, QWEN3_MOE, 90, ".experts.")["outcomes"]
    assert [kernel["error"] for kernel in found if "error" in kernel] == []
    assert {kernel["kernel"].split(".")[-2] for kernel in found} == {"route", "pairs", "group", "grouped"}
    assert [kernel for kernel in found if kernel["shared"] > SHARED_MEMORY] == []
    assert [kernel["kernel"] for kernel in found if kernel["early"] and not kernel["waits"]] == []
    assert {kernel["tensor_cores"] for kernel in found if "grouped_kernel" in kernel["kernel"]} == {True}


def stored_experts(size: int, activation: str, clamp: float | None) -> list[dict[str, Any]]:
    program = PROGRAM.partition("dry_run =")[0] + STORED
    found: list[dict[str, Any]] = printed(program, "", "90", json.dumps([size, activation, clamp]))[
        "outcomes"
    ]
    return found


def test_stored_experts_without_a_clamp_take_the_kernel_that_knows_every_activation():
    found = stored_experts(64, "gelu", None)
    assert [kernel["error"] for kernel in found if "error" in kernel] == []
    modules = {kernel["kernel"].split(".")[-2] for kernel in found}
    assert "mxfp4" in modules
    assert "mxfp4_tiles" not in modules


@pytest.mark.parametrize("size", [64, 2880])  # of one step along K, and of many
def test_stored_experts_compile_and_pass_no_weight_through_shared_memory(size: int):
    found = stored_experts(size, "silu", 7.0)
    assert [kernel["error"] for kernel in found if "error" in kernel] == []
    tiles = [kernel for kernel in found if "mxfp4_tiles" in kernel["kernel"]]
    assert len(tiles) == 4  # two products in tiles of 16 rows, and of 32
    assert [kernel["shared"] for kernel in tiles] == [0] * 4
    assert all(kernel["tensor_cores"] and kernel["waits"] for kernel in tiles)


def test_attention_and_linears_of_batches_use_the_tensor_cores(kernels):
    using = {found["kernel"] for found in kernels["outcomes"] if found.get("tensor_cores")}
    modules = {name.rpartition(".")[0].rpartition(".")[2] for name in using}
    assert {"decode_attention", "prefill_attention"} <= modules
    assert modules & {"gemm", "gemm_stream"}


def test_a_kernel_that_may_start_early_waits_for_its_inputs(kernels):
    """One that does not would let the kernel after it begin before the one before it has ended."""
    early = [found for found in kernels["outcomes"] if found["early"]]
    assert len(early) > 10
    assert [found["kernel"] for found in early if not found.get("waits")] == []


def test_no_kernel_has_an_argument_that_the_launcher_calls_its_own(kernels):
    """Triton makes a function of each kernel's arguments, and uses this name in it for something else."""
    assert len(kernels["arguments"]) > 20
    assert [name for name, arguments in kernels["arguments"].items() if "params" in arguments] == []


# Appended to PROGRAM up to its dry run: what weights of fewer bits and an 8-bit cache launch.
LOW = """
from ridgeline.models.weights.low_bits.plan import low_bit_plan
from ridgeline.ops.cuda.attention import prefill_specialized

prefill_specialized._multiprocessors = lambda device: 1
weights, kv_format = json.loads(sys.argv[3])
spec = read_spec(Path(sys.argv[1]))
dry_run = cuda_warm.StepDryRun(
    spec, torch.bfloat16, 64, 4096, 4096, 4096, low=low_bit_plan(spec, weights), kv_format=kv_format
)
launches = dry_run.decodes(1) + dry_run.decodes(16) + dry_run.prompts([300])
own = ("low_bits", "eight_bit_kv", "decode_attention", "prefill_attention")
launches = [launch for launch in launches if any(word in launch.kernel.__module__ for word in own)]
print(json.dumps({"outcomes": [outcome(launch) for launch in distinct(launches)]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "kv_format", "capability"),
    [("fp8", "fp8", 90), ("int4", "int8", 90), ("int8", "int8", 80), ("auto", "fp8", 90)],
)
def test_products_of_fewer_bits_and_an_8_bit_cache_compile(
    tmp_path: Path, weights: str, kv_format: str, capability: int
) -> None:
    wide = {**QWEN3_06B, "intermediate_size": 6144}  # more columns than a program reads at once
    if weights == "auto":  # as stored, in groups whose size is not a power of two
        wide["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [192, 192]}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    program = PROGRAM.partition("dry_run =")[0] + LOW
    asked, assumed = json.dumps([weights, kv_format]), {"RIDGELINE_ASSUME_CAPABILITY": str(capability)}
    found = printed(program, str(tmp_path), str(capability), asked, **assumed)["outcomes"]
    assert [kernel["error"] for kernel in found if "error" in kernel] == []
    assert {"gemv", "decode_attention", "eight_bit_kv"} <= {each["kernel"].split(".")[-2] for each in found}
    assert [kernel["kernel"] for kernel in found if kernel["early"] and not kernel["waits"]] == []
    products = [each for each in found if each["kernel"].split(".")[-2] in ("eight", "four")]
    assert products
    assert all(kernel["tensor_cores"] for kernel in products if "expand" not in kernel["kernel"])
