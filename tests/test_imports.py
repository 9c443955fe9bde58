"""Which packages need which libraries, checked by taking the others away in its own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline import AsyncClient, SamplingParams

FRONT_PACKAGES = (
    "starlette",
    "uvicorn",
    "prometheus_client",
    "rich",
    "huggingface_hub",
    "httptools",
    "uvloop",
    "grpc",
)
TORCH_PACKAGES = ("torch", "transformers")
# With FRONT_PACKAGES, what the in-process engine must do without.
MESSAGE_PACKAGES = ("msgspec", "pydantic", "jinja2", "llguidance")
NEED_MESSAGES = {
    f"ridgeline.engine.{name}"
    for name in (
        "link.messages",
        "run.engine_loop",
        "link.transport",
        "client.client",
        "client.open_embedding",
        "client.open_request",
        "encoder.core",
        "encoder.build",
        "encoder.encoder_loop",
        "encoder.runners",
        "grammar.library",  # the grammars' own library, and that alone
        *("caches.kernels", "caches.packed_weights", "caches.shipping"),
    )
} | {
    f"ridgeline.models.sources.{name}"
    for name in ("archive", "download", "holders", "manifest", "model_files", "obtain")
}
NEED_JINJA = {
    f"ridgeline.models.{name}"
    for name in (
        *("text.chat_template", "text.template_budget", "text.template_sandbox", "text.tokenizer"),
        *("gguf_output.tokenizer_metadata", "gguf_output.write"),  # they build tokenizers
    )
}
NO_NATIVE_LIBRARY = """
import ctypes

class Absent(ctypes.CDLL):
    def __init__(self, name, *args, **options):
        if "libridgeline" in str(name):
            raise OSError(f"{name} is taken away by this test")
        super().__init__(name, *args, **options)

ctypes.CDLL = Absent
"""
# What computes by torch, for the models that the native library does not serve.
NEED_TORCH = {
    "ridgeline.engine.run.cuda.masks",
    "ridgeline.engine.run.cuda.graphs",
    "ridgeline.engine.run.cuda.graph_recording",
    "ridgeline.engine.run.cuda.step_block",
    "ridgeline.engine.run.torch_runner",
    *(f"ridgeline.engine.run.drafters.{name}" for name in ("build", "chain_drafter", "medusa_drafter")),
    "ridgeline.engine.limits.torch_limits",
    "ridgeline.models.decoders.reference",
    "ridgeline.models.decoders.reference_layers",
    "ridgeline.models.encoders.reference",
    *(
        f"ridgeline.models.drafters.{name}"
        for name in ("eagle3", "medusa", "mtp", "rotation", "stored_tensors")
    ),
    "ridgeline.models.weights.low_bits.loading",
    "ridgeline.models.weights.torch_weights",
    "ridgeline.models.weights.stream",
    "ridgeline.ops.backend",
    "ridgeline.ops.inputs",
    "ridgeline.ops.input_rounding",
    "ridgeline.ops.low_bits",
    "ridgeline.ops.mxfp4",
    "ridgeline.ops.reference",
    "ridgeline.ops.torch_backend",
}
# What runs on a GPU, beside all of ridgeline.ops.cuda. It needs torch as well.
NEED_TRITON = {
    *(
        f"ridgeline.engine.run.cuda.{name}"
        for name in ("inputs", "launched_step", "padded_steps", "runner", "sampler", "verified_rows", "warm")
    ),
    "ridgeline.engine.start.cuda_trial",
    "ridgeline.engine.run.prompt_scores",
    "ridgeline.models.decoders.cuda",
    *(
        f"ridgeline.models.decoders.cuda_{part}"
        for part in ("attention", "buffers", "fused_layers", "ffn", "layers", "step")
    ),
}
GENERATE = """
from ridgeline import LLM, SamplingParams
llm = LLM({path!r}, kv_tokens=1024)
generation = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=4))[0]
print(len(generation.completions[0].tokens), generation.text)
"""


def without(packages: tuple[str, ...]) -> str:
    """The beginning of a program that cannot import these."""
    return f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"{{name}} is taken away by this test", name=name)

sys.meta_path.insert(0, Blocker())
"""


def import_everything(
    packages: tuple[str, ...], leave_out: set[str] | None = None, with_triton: bool = False
) -> str:
    of_the_gpu = set() if with_triton else NEED_TRITON
    return f"""
import importlib, pkgutil

for package in {packages!r}:
    package = importlib.import_module("ridgeline." + package)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        is_python = "libridgeline" not in module.name  # pkgutil takes any shared object for a module
        left_out = module.name in {(leave_out or set()) | of_the_gpu!r}
        left_out = left_out or (module.name.startswith("ridgeline.ops.cuda.") and not {with_triton})
        if is_python and not left_out:
            importlib.import_module(module.name)
            print(module.name)
"""


def attempts(modules: set[str]) -> str:
    """Prints each module that cannot be imported, and the package that it asked for."""
    failed = "except ModuleNotFoundError as error:\n print({0!r}, error.name.partition('.')[0])\n"
    return "".join(("try:\n import {0}\n" + failed).format(module) for module in sorted(modules))


def run(program: str) -> str:
    command, root = [sys.executable, "-c", program], Path(__file__).resolve().parents[1]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_engine_models_ops_and_telemetry_import_without_the_fronts_packages():
    packages = ("ops", "models", "engine", "telemetry")
    imported = run(without(FRONT_PACKAGES) + import_everything(packages)).split()
    assert {
        "ridgeline.engine.client.llm",
        "ridgeline.models.decoders.reference",
        "ridgeline.telemetry.metrics",
    } <= set(imported)


def test_the_in_process_engine_imports_without_messages_web_and_the_native_library():
    """Only what talks between processes may need the message library; nothing is loaded at import."""
    forbidden = without(FRONT_PACKAGES + MESSAGE_PACKAGES)
    everything = import_everything(("ops", "models", "engine"), NEED_MESSAGES | NEED_JINJA)
    imported = set(run(NO_NATIVE_LIBRARY + forbidden + everything).split())
    modules = ("client.llm", "start.build", "run.core", "limits.calibration", "run.torch_runner")
    needed = {f"ridgeline.engine.{name}" for name in modules}
    assert needed | {"ridgeline.models.decoders.reference", "ridgeline.ops.reference"} <= imported


def test_the_gpu_engine_and_its_benchmark_import_where_there_is_nothing_but_torch_and_triton():
    pytest.importorskip("triton", reason="triton is not installed; the GPU engine's imports are not tested")
    forbidden = without(FRONT_PACKAGES + MESSAGE_PACKAGES)
    left_out = NEED_MESSAGES | NEED_JINJA
    everything = import_everything(("ops", "models", "engine"), left_out, with_triton=True)
    imported = set(run(NO_NATIVE_LIBRARY + forbidden + everything + "\nimport benchmarks.gpu_engine").split())
    assert {"ridgeline.engine.start.cuda_build", "ridgeline.ops.cuda.linear.gemm"} | NEED_TRITON <= imported


def test_only_what_runs_on_a_gpu_needs_triton():
    """If one of them no longer does, it leaves the list above."""
    everything = import_everything(("ops", "models", "engine"))
    found = run(without(("triton",)) + attempts(NEED_TRITON) + everything).split()
    needing, imported = found[: 2 * len(NEED_TRITON)], found[2 * len(NEED_TRITON) :]
    assert dict(zip(needing[::2], needing[1::2], strict=True)) == dict.fromkeys(NEED_TRITON, "triton")
    assert {"ridgeline.engine.start.cuda_build", "ridgeline.models.decoders.cuda_workspace"} <= set(imported)


def test_only_the_message_layer_needs_the_message_library():
    lines = run(without(MESSAGE_PACKAGES) + attempts(NEED_MESSAGES)).splitlines()
    found = dict(line.split() for line in lines)
    assert found.keys() == NEED_MESSAGES
    assert set(found.values()) <= {"msgspec", "llguidance"}


def test_the_python_api_generates_without_torch_and_the_fronts_packages(smollm2_path):
    program = without(FRONT_PACKAGES + TORCH_PACKAGES) + GENERATE.format(path=str(smollm2_path))
    assert run(program).startswith("4  Paris.")


def test_everything_but_the_torch_backend_imports_without_torch():
    packages = ("ops", "models", "engine", "telemetry", "server", "cli")
    imported = run(without(TORCH_PACKAGES) + import_everything(packages, NEED_TORCH)).split()
    assert {
        "ridgeline.engine.run.engine_loop",
        "ridgeline.engine.run.native_runner",
        "ridgeline.server.process.main",
    } <= set(imported)


def test_only_the_torch_backend_needs_torch():
    """If one of them no longer does, it leaves the list above."""
    lines = run(without(TORCH_PACKAGES) + attempts(NEED_TORCH)).splitlines()
    assert dict(line.split() for line in lines) == dict.fromkeys(NEED_TORCH, "torch")


@pytest.mark.parametrize(
    "module", ["ridgeline.server.process.main", "ridgeline.engine.client.client", "ridgeline.cli.main"]
)
def test_the_front_imports_no_torch(module):
    """Tensors never enter it; importing torch would cost it seconds and hundreds of megabytes."""
    heavy = run(f"import sys, {module}; print(*sorted(sys.modules.keys() & {set(TORCH_PACKAGES)!r}))")
    assert heavy.split() == []


def test_a_front_that_has_read_its_tokenizer_has_no_numpy_in_it(smollm2_path):
    """It would take 13 MB, a twentieth of a second, and a thread that spins."""
    imports = (
        "import pathlib, sys, ridgeline.server.process.main, ridgeline.server.app, ridgeline.web.listener"
    )
    load = f"ridgeline.engine.client.launch.load_tokenizer(pathlib.Path({str(smollm2_path)!r}))"
    assert run(f"{imports}; {load}; print('numpy' in sys.modules)").strip() == "False"


async def test_an_engine_process_that_has_answered_has_no_torch_in_it(smollm2_path):
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    async with await AsyncClient.start(str(smollm2_path), kv_tokens=1024) as client:
        assert client.hello.backend.startswith("native")
        text = "".join([chunk.text async for chunk in client.generate("The capital of France is", greedy)])
        assert "Paris" in text
        libraries = Path(f"/proc/{client.hello.pid}/maps").read_text()
    assert "libridgeline_native" in libraries
    assert "libtorch" not in libraries


def test_a_server_imports_the_http_stack_only_after_its_engine_was_started():
    """The two load side by side; whatever `server.process.main` imports first delays the engine."""
    early = run("import sys, ridgeline.server.process.main; print(*sys.modules)").split()
    late = {"uvicorn", "starlette", "tokenizers", "jinja2", "numpy", "prometheus_client", "msgspec", "grpc"}
    assert late.isdisjoint(early)


@pytest.mark.parametrize("module", ["ridgeline.gateway.process.main", "ridgeline.gateway.process.worker"])
def test_the_gateway_imports_nothing_of_the_server_nor_what_few_gateways_need(module):
    """It talks to servers over HTTP; whatever is for some settings only is imported where they ask for it."""
    imported = set(run(f"import sys, {module}; print(*sys.modules)").split())
    assert module in imported
    layers = {f"ridgeline.{layer}" for layer in ("server", "engine", "models", "ops", "lab", "cli")}
    seldom = {
        "numpy",
        "asyncpg",
        "presidio_analyzer",
        "spacy",
        "opentelemetry",
        "genai_prices",
        "phonenumbers",
        "grpc",
        "google.protobuf",
    }
    assert imported.isdisjoint({*TORCH_PACKAGES, *layers, *seldom})


def test_the_gateway_s_supervisor_leaves_the_http_stack_and_what_answers_requests_to_its_workers():
    imported = set(run("import sys, ridgeline.gateway.process.main; print(*sys.modules)").split())
    assert imported.isdisjoint(
        {"uvicorn", "starlette", "ridgeline.gateway.pipeline.app", "ridgeline.gateway.process.worker"}
    )
