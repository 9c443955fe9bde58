"""Which engine can serve a plan: ridgeline if it supports model and hardware; and other engines' command
lines.

Used by `make_plan` and `result`. An unsupported feature is stated as the reason, not worked around.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ridgeline.lab.hardware.chip import Chip
from ridgeline.models.errors import ModelError
from ridgeline.models.files.hub import fetch_config, hub_id
from ridgeline.models.files.registry import find_known, resolve
from ridgeline.models.spec.coverage import PLANNED_FORMATS
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.find_spec import published_for, spec_of
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec

SIXTEEN_BITS = ("bfloat16", "float16")
CPU_KV = ("bfloat16", "float32", "int8", "int4")  # as --kv-dtype of the native backend has them


def ridgeline_refusal(model: str, chip: Chip, precision: str | None, kv_precision: str = "bfloat16") -> str:
    """Why ridgeline cannot serve it there; empty if it can."""
    if chip.name.startswith("mi"):
        return f"it has no kernels for {chip.title}"
    try:
        check_servable(served_spec(model))
    except ModelError as error:
        return re.split(r"; |\. ", str(error))[0]
    if chip.name != "cpu" and precision is not None and precision not in PLANNED_FORMATS["cuda"]:
        return f"on a GPU its weights are {', '.join(PLANNED_FORMATS['cuda'])}, not {precision}"
    if kv_precision not in (CPU_KV if chip.name == "cpu" else SIXTEEN_BITS):
        where = "a processor" if chip.name == "cpu" else "a GPU"
        return f"on {where} it keeps no keys and values in {kv_precision}"
    return ""


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
