"""The weight formats that a plan considers: as stored first, then smaller ones that the engine serves there.

Used by `choose`. ridgeline's formats are those of its backends (`coverage`), not a list of the planner.
"""

from __future__ import annotations

from ridgeline.lab.hardware.chip import CPU
from ridgeline.lab.plan.engines import gpu_precision, served_spec
from ridgeline.lab.plan.plan_types import PlanRequest
from ridgeline.models.errors import ModelError
from ridgeline.models.spec.coverage import PLANNED_FORMATS, Backend, refusal
from ridgeline.models.spec.precision import WHOLE, Precision, packed_precision

SMALLER = 0.9  # of the stored size; what saves less is not considered


def backend_of(request: PlanRequest, engine: str) -> str:
    """native, torch or cuda for ridgeline; another engine's own name."""
    return engine if engine != "ridgeline" else ridgeline_backend(request)


def ridgeline_backend(request: PlanRequest) -> Backend:
    if request.chip.name != CPU:
        return "cuda"
    try:
        return "native" if refusal(served_spec(request.model), "native") is None else "torch"
    except ModelError:
        return "native"  # not servable: no format matters


def stored_precision(request: PlanRequest, engine: str) -> Precision:
    """What the engine keeps of the files as they are."""
    stored = request.shape.stored
    if engine != "ridgeline":
        return stored
    backend = ridgeline_backend(request)
    if backend == "cuda":
        return gpu_precision(request.shape, request.chip)
    return packed_precision(stored) if backend == "native" else Precision.named("float32")


def precisions_for(request: PlanRequest, engine: str) -> list[Precision]:
    """As stored, then the smaller ones that chip and engine support; or the requested one alone."""
    if request.precision is not None:
        return [Precision.named(request.precision)]
    stored = stored_precision(request, engine)
    if engine == "ridgeline":
        names = [name for name in PLANNED_FORMATS[ridgeline_backend(request)] if name not in WHOLE]
    else:
        units = (("fp8", "fp8"), ("nvfp4", "fp4"))
        names = [name for name, unit in units if unit in request.chip.flops] + ["int4"]
    size = request.shape.weight_bytes(stored)
    smaller = [Precision.named(name) for name in names]
    return [stored, *(one for one in smaller if request.shape.weight_bytes(one) < SMALLER * size)]
