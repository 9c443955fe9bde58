"""Step time, time per output token and time to first token from first principles, with intervals.

The terms of the roofline, each with a constant for the share of the limit that engines reach (`constants`),
and times per layer, call and sequence that a roofline does not include. The planner uses TPOT and TTFT of a
closed loop of `batch` requests; the simulator uses `step_seconds` if there are no step records. Needs no
numpy.

    step = max(bytes / memory rate, operations / matrix rate)
           + all-reduces + layers · overhead + sequences · cost
    TPOT = step of the running batch + (batch − 1) · prefill of one prompt / output length
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.lab.errors import BadInput
from ridgeline.lab.perfmodel.constants import Coefficients, coefficients_of
from ridgeline.lab.perfmodel.deployment import Deployment, Setting, Work
from ridgeline.lab.perfmodel.intervals import interval
from ridgeline.lab.prediction import Interval

__all__ = ["Deployment", "predict_tpot", "predict_ttft", "step_seconds", "tpot_seconds", "ttft_seconds"]

# Memory and arithmetic overlap imperfectly: a soft maximum, 26 % above the hard one where both are equal.
OVERLAP = 3.0


def predict_tpot(deployment: Deployment, batch: float, isl: int, osl: int) -> Interval:
    """Seconds per output token after the first, with `batch` requests in flight at any time."""
    mid = tpot_seconds(closed_loop(deployment, batch, isl, osl), engine_constants(deployment))
    return interval("tpot", mid, deployment, batch, isl, osl)


def predict_ttft(deployment: Deployment, batch: float, isl: int, osl: int) -> Interval:
    """Seconds to the first token with `batch` requests in flight, each sent when another ends."""
    mid = ttft_seconds(closed_loop(deployment, batch, isl, osl), engine_constants(deployment))
    return interval("ttft", mid, deployment, batch, isl, osl)


def step_seconds(
    deployment: Deployment,
    prefill_tokens: float,
    prefill_context_product: float,
    decode_batch: float,
    decode_context: float,
    prefill_rows: float = 1,
) -> float:
    """One step of prompt chunks and decodes together. The arguments are those of `schedule.step.StepWork`.

    `prefill_context_product` is the sum over chunks of tokens · (tokens cached before + tokens), and
    `decode_context` the sum of the lengths of the decoding sequences. Chunks count as equally long.
    """
    constants = engine_constants(deployment)
    seconds = constants.step_s + decode_batch * constants.sequence_s
    setting = deployment.setting
    prompt = None
    if prefill_tokens > 0:
        behind = prefill_context_product / prefill_tokens - prefill_tokens / max(prefill_rows, 1)
        prompt = deployment.prefill(prefill_tokens, max(behind, 0.0), rows=max(prefill_rows, 1))
        seconds += setting.layers * constants.prefill_layer_s / (setting.stage_hops + 1)
    if decode_batch > 0:
        work = deployment.decode(decode_batch, decode_context / decode_batch)
        seconds += device_seconds(work, setting, constants)
        return seconds + (prompt_seconds(prompt, setting, constants) if prompt else 0.0)
    # Without decodes the prompt reads the weights itself, and only the experts that it uses.
    weights = deployment.decode(max(prefill_tokens, 1.0), 1)
    read = Work(linear_bytes=weights.linear_bytes, expert_bytes=weights.expert_bytes)
    compute = prompt_seconds(prompt, setting, constants) if prompt else 0.0
    return seconds + soft_maximum(read_seconds(read, setting, constants), compute)


@dataclass(frozen=True)
class ClosedLoop:
    """The passes of a closed loop; fields may be arrays of many loops, like those of Work."""

    setting: Setting
    decode: Work  # of the sequences that run at once
    prompt: Work  # one whole prompt
    running: float  # sequences in a step
    waiting: float  # sequences that do not fit the cache
    osl: float
    interference: float = 1.0  # 0 where prompts are computed elsewhere


def closed_loop(
    deployment: Deployment, batch: float, isl: int, osl: int, *, disaggregated: bool = False
) -> ClosedLoop:
    if batch <= 0 or isl < 1 or osl < 1:
        raise BadInput(f"nothing to predict for {batch} requests of {isl} tokens in and {osl} out")
    context = isl + osl // 2
    running = deployment.running(batch, context)
    return ClosedLoop(
        setting=deployment.setting,
        decode=deployment.decode(running, context),
        prompt=deployment.prefill(isl),
        running=running,
        waiting=max(batch - running, 0.0),
        osl=osl,
        interference=0.0 if disaggregated else 1.0,
    )


def engine_constants(deployment: Deployment) -> Coefficients:
    on_cpu = deployment.chip.name == "cpu" and deployment.backend == "ridgeline"
    return coefficients_of("ridgeline-cpu" if on_cpu else deployment.backend)


# ---- the formula: plain arithmetic, for numbers and arrays ----


def tpot_seconds(loop: ClosedLoop, c: Coefficients) -> float:
    """While a sequence decodes, every other one passes through a prefill once per `osl` tokens."""
    decode = device_seconds(loop.decode, loop.setting, c) + c.step_s + loop.running * c.sequence_s
    return decode + loop.interference * (loop.running - 1) / loop.osl * _whole_prompt(loop, c)


def ttft_seconds(loop: ClosedLoop, c: Coefficients) -> float:
    """The prompt's own pass, a share of the prompts before it, a few steps, and the wait for cache space."""
    step = tpot_seconds(loop, c)
    prompts = _whole_prompt(loop, c) * c.prefill_factor * (1 + c.queue_share * (loop.running - 1))
    wait = loop.waiting / loop.running * loop.osl * step
    return c.first_s + prompts + c.steps_waited * step + c.room_share * wait


def device_seconds(work: Work, s: Setting, c: Coefficients) -> float:
    """A pass of decodes on the device: bytes and operations overlap, the rest adds up."""
    overlapped = soft_maximum(read_seconds(work, s, c), compute_seconds(work, s, c))
    per_layer = (
        s.layers * c.layer_s
        + s.quantized_layers * c.quantized_layer_s
        + s.latent_layers * c.latent_layer_s
        + s.recurrent_layers * c.recurrent_layer_s
        + s.expert_layers * c.expert_layer_s
    )
    calls = s.reduction_hops * c.reduce_hop_s + s.stage_hops * c.stage_hop_s
    sent = work.reduced_bytes / (c.link * s.link_bytes_per_s)
    return overlapped + per_layer + calls + sent


def prompt_seconds(work: Work, s: Setting, c: Coefficients) -> float:
    """Prompt tokens beside decodes: their operations and communication."""
    return compute_seconds(work, s, c) + work.reduced_bytes / (c.link * s.link_bytes_per_s)


def read_seconds(work: Work, s: Setting, c: Coefficients) -> float:
    linear = work.linear_bytes / c.read_linear * (1 + (c.int4_read - 1) * s.linear_int4)
    experts = work.expert_bytes / c.read_experts * (1 + (c.int4_read - 1) * s.expert_int4)
    return (linear + experts + work.cache_bytes / c.read_cache) / s.bytes_per_s


def compute_seconds(work: Work, s: Setting, c: Coefficients) -> float:
    linear = c.linear_flops * (1 + s.linear_narrow * (c.narrow_flops - 1))
    experts = c.linear_flops * c.expert_flops * (1 + s.expert_narrow * (c.narrow_flops - 1))
    return (
        work.linear_flops / (linear * s.linear_flops_per_s)
        + work.expert_flops / (experts * s.expert_flops_per_s)
        + work.attention_flops / (c.attention_flops * s.attention_flops_per_s)
    )


def soft_maximum(a: float, b: float) -> float:
    total: float = (a**OVERLAP + b**OVERLAP) ** (1 / OVERLAP)
    return total


def _whole_prompt(loop: ClosedLoop, c: Coefficients) -> float:
    stages = loop.setting.stage_hops + 1
    passes = loop.setting.layers * c.prefill_layer_s / stages
    return prompt_seconds(loop.prompt, loop.setting, c) + passes
