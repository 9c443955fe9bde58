"""The minimum bytes and the FLOPs of the operators over a number of steps. Pure data.

`run` compares them with measured times. Bytes are weights, once per step that uses them, and keys and values;
activations are not counted, since they stay in a cache between layers. FLOPs are those of a plain forward
pass of the computed tokens; a multiplication and an addition count as two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import BYTES_PER_PARAMETER
from ridgeline.telemetry.stats import StepRecord

if TYPE_CHECKING:
    from ridgeline.engine.start.build import BuiltEngine
    from ridgeline.ops.cpu.library import DecoderTable

MATRICES = ("qkv", "output", "gate_up", "down", "lm_head")
OPERATORS = (*MATRICES, "attention", "kv_write")


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved and FLOPs of one operator over all steps."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class Steps:
    """Executed steps, and the number of sampled tokens."""

    records: tuple[StepRecord, ...]
    samples: int
    sampling_steps: int  # steps with at least one sample: those that read the LM head

    @property
    def tokens(self) -> int:
        return sum(record.prefill_tokens + record.decode_batch for record in self.records)


def work_of(
    steps: Steps, spec: ModelSpec, weight_bytes: dict[str, float], kv_token_bytes: float
) -> dict[str, Work]:
    """By the names in OPERATORS. `weight_bytes`: of each matrix, all layers together."""
    tokens, count = steps.tokens, len(steps.records)
    parameters = matrix_parameters(spec)
    work = {
        name: Work(count * weight_bytes[name], 2 * parameters[name] * tokens)
        for name in MATRICES
        if name != "lm_head"
    }
    work["lm_head"] = Work(
        steps.sampling_steps * weight_bytes["lm_head"], 2 * parameters["lm_head"] * steps.samples
    )
    read, pairs = 0.0, 0.0
    for record in steps.records:
        one_read, one_pairs = _attended(record, spec)
        read, pairs = read + one_read, pairs + one_pairs
    work["attention"] = Work(
        read * kv_token_bytes, 4 * spec.num_heads * spec.head_dim * spec.num_layers * pairs
    )
    work["kv_write"] = Work(tokens * kv_token_bytes)
    return work


def matrix_parameters(spec: ModelSpec) -> dict[str, int]:
    """Weights multiplied per token, all layers together; only the chosen experts."""
    heads = spec.hidden_size * spec.head_dim * spec.num_layers
    projections = heads * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    ffn = spec.matmul_parameters - projections
    return {
        "qkv": heads * (spec.num_heads + 2 * spec.num_kv_heads),
        "output": heads * spec.num_heads,
        "gate_up": ffn * 2 // 3,
        "down": ffn - ffn * 2 // 3,
        "lm_head": spec.vocab_size * spec.hidden_size,
    }


def weight_bytes(built: BuiltEngine) -> dict[str, float]:
    """Bytes of each matrix as this engine stores it, all layers together."""
    if built.backend == "native":
        from ridgeline.engine.run.native_runner import NativeRunner

        assert isinstance(built.core.runner, NativeRunner)
        return packed_bytes(built.core.runner.decoder.table)
    each = BYTES_PER_PARAMETER[built.dtype]
    return {name: each * count for name, count in matrix_parameters(built.spec).items()}


def packed_bytes(table: DecoderTable) -> dict[str, float]:
    """Experts count with the share that one token chooses."""
    layers = table.layers

    def ffn(name: str) -> float:
        total = 0.0
        for layer in layers:
            dense, experts = getattr(layer, name), layer.experts
            total += 0 if dense is None else dense.data.nbytes
            if experts is not None:
                total += getattr(experts, name).data.nbytes * experts.per_token / experts.num
        return total

    return {
        "qkv": sum(layer.qkv.data.nbytes for layer in layers),
        "output": sum(layer.output.data.nbytes for layer in layers),
        "gate_up": ffn("gate_up"),
        "down": ffn("down"),
        "lm_head": table.lm_head.data.nbytes,
    }


def idle_share(records: Sequence[StepRecord]) -> float | None:
    """The share of the time from the first step's planning to the last one's end without a forward pass."""
    if len(records) < 2:
        return None
    last = records[-1]
    span = last.start + last.schedule_s + last.wall_s - records[0].start
    return max(0.0, 1 - sum(record.busy_s for record in records) / span) if span > 0 else None


def _attended(record: StepRecord, spec: ModelSpec) -> tuple[float, float]:
    """KV tokens read and query-key pairs, as means over the layers, which may have windows."""
    read = pairs = 0.0
    if record.decode_batch:
        seen = _mean_seen(record.decode_context / record.decode_batch, spec)
        read += record.decode_batch * seen
        pairs += record.decode_batch * seen
    if record.prefill_rows:
        chunk = record.prefill_tokens / record.prefill_rows
        end = record.prefill_context_product / record.prefill_tokens
        read += record.prefill_rows * _mean_read(end, chunk, spec)
        flops = spec.attention_flops(round(chunk), max(0, round(end - chunk)))
        pairs += record.prefill_rows * flops / (4 * spec.num_heads * spec.head_dim * spec.num_layers)
    return read, pairs


def _mean_seen(context: float, spec: ModelSpec) -> float:
    return spec.kv_tokens_seen(round(context)) / spec.num_layers


def _mean_read(end: float, chunk: float, spec: ModelSpec) -> float:
    """KV tokens that a chunk's queries attend to together: the chunk, and before it as far as its first query
    sees.
    """
    seen = (min(end, (mixer.window or end) + chunk - 1) for mixer in spec.attentions)
    return sum(seen) / spec.num_layers
