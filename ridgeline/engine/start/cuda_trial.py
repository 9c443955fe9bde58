"""Measures the cost of --deterministic on a GPU: the same two steps with and without it, at engine start.

The cost depends on model and device. Both decoders use the runner's own buffers and cache, before any
request arrives; the decode without it is replayed from a graph, as the runner does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ridgeline.models.decoders.cuda import CudaDecoder
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.ops.cuda.attention.prefill_attention import tile_tokens_of
from ridgeline.ops.cuda.attention.prefill_plan import plan_prefill

REPEATS = 5


def cost_of_determinism(decoder: CudaDecoder, rows: int, tokens: int, max_context: int, graphs: bool) -> str:
    """The cost as text, for a decode step of `rows` and a prefill of `tokens`. `decoder`: deterministic."""
    fast = CudaDecoder(
        decoder.spec, decoder.stored, decoder.kv, decoder.buffers, max_context, kv_steps=decoder.kv_steps
    )
    rows, tokens = _with_room(decoder, rows, tokens, max_context)
    with torch.inference_mode():
        decode = _best_seconds(partial(decoder.forward, trial_step(decoder, [1] * rows, max_context)))
        prefill = _best_seconds(partial(decoder.forward, trial_step(decoder, [tokens], max_context)))
        fast_decode = _best_seconds(_replayed(fast, trial_step(fast, [1] * rows, max_context), graphs))
        fast_prefill = _best_seconds(partial(fast.forward, trial_step(fast, [tokens], max_context)))
    return (
        f"a decode step of {rows} sequences takes {decode / fast_decode:.2f} times as long as without it, "
        f"a prefill of {tokens} tokens {prefill / fast_prefill:.2f} times"
    )


def _with_room(decoder: CudaDecoder, most_rows: int, most_tokens: int, max_context: int) -> tuple[int, int]:
    """Sequences of the decode step and tokens of the prefill, as far as they fit."""
    num_blocks, block_size = decoder.kv.shape[1], decoder.kv.shape[4]
    rows = min(most_rows, num_blocks, len(decoder.buffers.logits))
    return rows, min(most_tokens, max_context, num_blocks * block_size, len(decoder.buffers.residual))


def trial_step(decoder: CudaDecoder, lengths: list[int], max_context: int) -> DeviceStep:
    """Whole prompts of these lengths, each in separate blocks; with one token each: a decode batch."""
    spec, device, block_size = decoder.spec, decoder.kv.device, decoder.kv.shape[4]
    width = -(-max(lengths) // block_size)

    def ints(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    tables = torch.zeros(len(lengths), -(-max_context // block_size), dtype=torch.int32, device=device)
    tables[:, :width] = ints(range(len(lengths) * width)).view(len(lengths), width)
    positions = [place for length in lengths for place in range(length)]
    slots = [
        row * width * block_size + place for row, length in enumerate(lengths) for place in range(length)
    ]
    ends = [sum(lengths[: row + 1]) - 1 for row in range(len(lengths))]
    is_decode = max(lengths) == 1 and not decoder.deterministic
    rows = list(range(len(lengths)))
    prefill = None
    if not is_decode:
        tile_tokens = tile_tokens_of(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, decoder.buffers.q.dtype
        )
        plan = plan_prefill(lengths, lengths, tile_tokens, table_rows=rows)
        prefill = plan.device_views(ints(plan.pack()))
    return DeviceStep(
        token_ids=ints([0] * sum(lengths)),
        positions=ints(positions),
        slots=ints(slots),
        tables=tables,
        table_rows=ints(rows if is_decode else []),
        num_decodes=len(rows) if is_decode else 0,
        num_logits=len(rows),
        logit_rows=None if is_decode else ints(ends),
        prefill=prefill,
    )


def _replayed(decoder: CudaDecoder, step: DeviceStep, graphs: bool) -> Callable[[], object]:
    if not graphs or not decoder.kv.is_cuda:
        return partial(decoder.forward, step)
    decoder.forward(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.forward(step)
    return graph.replay


def _best_seconds(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(REPEATS):
        _wait()
        started = time.perf_counter()
        work()
        _wait()
        best = min(best, time.perf_counter() - started)
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
