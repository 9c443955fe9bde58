"""Which engine can serve a plan: ridgeline if it supports model and hardware; and other engines' command
lines.

Used by `make_plan` and `result`. An unsupported feature is stated as the reason, not worked around.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ridgeline.lab.hardware.chip import CPU, Chip
from ridgeline.models.errors import ModelError
from ridgeline.models.files.hub import fetch_config, hub_id
from ridgeline.models.files.registry import find_known, resolve
from ridgeline.models.spec.coverage import PLANNED_FORMATS
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.find_spec import published_for, spec_of
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.low_bits.kept_precision import kept_precision

# As --kv-dtype of the native and the GPU backend has them; FP8 needs a GPU that multiplies it.
CPU_KV = ("bfloat16", "float32", "int8", "int4")
GPU_KV = ("bfloat16", "float16", "fp8", "int8")


def ridgeline_refusal(model: str, chip: Chip, precision: str | None, kv_precision: str = "bfloat16") -> str:
    """Why ridgeline cannot serve it there; empty if it can."""
    if chip.name.startswith("mi"):
        return f"it has no kernels for {chip.title}"
    try:
        spec = served_spec(model)
        check_servable(spec)
    except ModelError as error:
        return re.split(r"; |\. ", str(error))[0]
    if chip.name == CPU:
        known = kv_precision in CPU_KV
        return "" if known else f"on a processor it keeps no keys and values in {kv_precision}"
    if precision is not None and precision not in PLANNED_FORMATS["cuda"]:
        stored = str(gpu_precision(spec, chip))
        if str(Precision.named(precision)) != stored:
            return (
                f"its speed on a GPU with weights in {precision} is not measured: a plan has them as stored "
                f"({stored}), or in {', '.join(PLANNED_FORMATS['cuda'])}"
            )
    if kv_precision not in GPU_KV:
        return f"on a GPU it keeps no keys and values in {kv_precision}"
    if kv_precision == "fp8" and "fp8" not in chip.flops:
        return f"keys and values in fp8 need a GPU that multiplies FP8, and {chip.title} does not"
    return ""


def gpu_precision(shape: ModelSpec, chip: Chip) -> Precision:
    """What ridgeline keeps on this GPU of the files as they are; shape: of a served family."""
    return kept_precision(shape, has_fp8="fp8" in chip.flops)


def other_command(
    engine: str,
    model: str,
    *,
    tp: int,
    pp: int,
    ep: int = 1,
    precision: str,
    kv_precision: str = "bfloat16",
    max_running: int,
) -> str:
    """The start command of another engine for the plan; precision: empty if it is the stored one.

    Flags of the versions that its times were fitted on.
    """
    name = model.removeprefix("hf:")
    if engine == "sglang":
        words = ["python", "-m", "sglang.launch_server", "--model-path", name, "--tp-size", str(tp)]
        words += ["--pp-size", str(pp)] * (pp > 1) + ["--max-running-requests", str(max_running)]
        words += ["--ep-size", str(ep)] * (ep > 1)
    elif engine == "trtllm":
        words = ["trtllm-serve", name, "--tp_size", str(tp)] + ["--pp_size", str(pp)] * (pp > 1)
        words += ["--max_batch_size", str(max_running)] + ["--ep_size", str(ep)] * (ep > 1)
    else:
        words = ["vllm", "serve", name, "--tensor-parallel-size", str(tp)]
        words += ["--pipeline-parallel-size", str(pp)] * (pp > 1) + ["--max-num-seqs", str(max_running)]
        words += ["--enable-expert-parallel"] * (ep > 1)
    if engine != "trtllm" and precision == "fp8":
        words += ["--quantization", "fp8"]
    if engine != "trtllm" and kv_precision == "fp8":
        words += ["--kv-cache-dtype", "fp8" if engine == "vllm" else "fp8_e4m3"]
    return shlex.join(words)


def served_spec(model: str) -> ModelSpec:
    """As the engine reads it; ModelError if no family of it is served."""
    known = published_for(model)
    if known is not None:
        return spec_of(known)
    if find_known(model) is not None:
        return read_spec(resolve(model).path)
    return read_spec(fetch_config(model) if hub_id(model) is not None else Path(model).expanduser())
