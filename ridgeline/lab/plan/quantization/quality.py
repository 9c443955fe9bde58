"""Finds the quality verdict of a weight format of the planned model, and the command that would make one.

A verdict counts if it is about the same weights, format, KV type and backend (`evaluate.verdicts`); one about
another file of the same name does not.
"""

from __future__ import annotations

import shlex

from ridgeline.lab.evaluate.verdicts import STORED, WIDE_KV, newest
from ridgeline.lab.plan.plan_types import PlanRequest
from ridgeline.lab.plan.quantization.figures import AS_STORED, FormatQuality
from ridgeline.lab.plan.quantization.formats import backend_of, stored_precision
from ridgeline.models.spec.precision import WHOLE, Precision

# Allowed mean KL in nats of the proposed gate: what the 8B class is given (docs/evaluate.md).
KL_MARGINS = {"fp8": 0.02, "int8": 0.01, "int8-channel": 0.01}
KL_MARGIN_4_BITS, KL_MARGIN_KV = 0.035, 0.001
# Of other engines: one serves the model as stored, the other in the format.
REFERENCE_URL, CANDIDATE_URL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


def format_quality(request: PlanRequest, engine: str, precision: Precision) -> FormatQuality:
    backend, kv = backend_of(request, engine), request.kv_precision
    is_stored = str(precision) == str(stored_precision(request, engine))
    if is_stored and kv in WIDE_KV:
        return AS_STORED
    if precision.linear in WHOLE and precision.experts in WHOLE and kv in WIDE_KV:
        return FormatQuality("not quantized")
    weights = STORED if is_stored else str(precision)
    # A bare name: "mxfp4" means "bfloat16, experts mxfp4".
    command = gate_command(request, engine, backend, STORED if is_stored else precision.experts)
    verdict = newest(request.verdicts, request.identity, weights=weights, kv=kv, backend=backend)
    if verdict is None:
        return FormatQuality("not gated", command)
    matched = verdict.served.model.same_as(request.identity)
    return FormatQuality("passed" if verdict.passed else "failed", command, verdict, matched)


def gate_command(request: PlanRequest, engine: str, backend: str, weights: str) -> str:
    """The command whose verdict would count for this format."""
    kv, is_wide_kv = request.kv_precision, request.kv_precision in WIDE_KV
    margin = 0.0 if weights == STORED else KL_MARGINS.get(weights, KL_MARGIN_4_BITS)
    margin += 0.0 if is_wide_kv else KL_MARGIN_KV
    gate = ["ridgeline", "evaluate", "gate", "--kl-margin", f"{margin:g}"]
    if engine != "ridgeline":
        stated = f"{request.model},weights={weights},engine={engine}" + ("" if is_wide_kv else f",kv={kv}")
        servers = ["--reference", REFERENCE_URL, "--candidate", CANDIDATE_URL]
        return shlex.join([*gate, *servers, "--record-as", stated])
    reference = f"{request.model},backend={backend}"
    candidate = reference if weights == STORED else f"{reference},weights={weights}"
    candidate += "" if is_wide_kv else f",kv_dtype={kv}"
    return shlex.join([*gate, "--reference", reference, "--candidate", candidate])
