"""One decode step or prompt step of a model's shape, without the host: its share of the limit, µs a layer,
then kernel by kernel.

Some of the model's layers with random weights, all kernels of the decoder as one CUDA graph, no sampling.
RIDGELINE_PDL=0 shows every kernel alone; with it, kernels are counted while they wait for the one before.

    python benchmarks/gpu/step.py --model qwen3-30b-a3b --rows 1,64 --prompts 2x4096 --top 12 --json step.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from gpu.limits import step_limit_seconds
from gpu.workloads import SHAPES, write_config
from ridgeline.models.decoders.cuda import CudaDecoder, DeviceStep
from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.torch_weights import random_weights
from ridgeline.ops.cuda.attention.prefill_attention import tile_tokens_of
from ridgeline.ops.cuda.attention.prefill_plan import plan_prefill

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Record:
    """A step's numbers as `step_limit_seconds` reads them."""

    decode_batch: int = 0
    decode_context: int = 0  # tokens of all decode rows
    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_context_product: int = 0  # Σ of a prompt's tokens times its context

    @staticmethod
    def decodes(rows: int, context: int) -> Record:
        return Record(decode_batch=rows, decode_context=rows * context)

    @staticmethod
    def prompts(count: int, length: int) -> Record:
        product = count * length * length
        return Record(prefill_rows=count, prefill_tokens=count * length, prefill_context_product=product)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of several replays."""

    least: float
    median: float
    most: float

    @staticmethod
    def of(seconds: list[float]) -> Spread:
        return Spread(min(seconds), statistics.median(seconds), max(seconds))

    def __str__(self) -> str:
        return f"{1e6 * self.median:.1f} µs ({1e6 * self.least:.1f} to {1e6 * self.most:.1f})"

    def microseconds(self) -> dict[str, float]:
        return {"min_us": 1e6 * self.least, "median_us": 1e6 * self.median, "max_us": 1e6 * self.most}


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: the whole of it, its head alone, and the least time that the card's ceilings allow."""

    name: str
    layers: int
    whole: Spread
    head: Spread
    limit_s: float

    @property
    def layer_s(self) -> float:
        return (self.whole.median - self.head.median) / self.layers

    @property
    def of_limit(self) -> float:
        return self.limit_s / self.whole.median

    def __str__(self) -> str:
        share = f"{100 * self.of_limit:.0f} % of the limit, {1e6 * self.limit_s:.1f} µs"
        return f"{self.name}: {self.whole}, {share}; head {self.head}; {1e6 * self.layer_s:.2f} µs a layer"

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.name,
            "layers": self.layers,
            **self.whole.microseconds(),
            "head": self.head.microseconds(),
            "layer_us": 1e6 * self.layer_s,
            "limit_us": 1e6 * self.limit_s,
            "of_limit": self.of_limit,
        }


class Steps:
    def __init__(self, spec: ModelSpec, tokens: int, rows: int, context: int) -> None:
        self.spec, self.context = spec, context
        device = torch.device("cuda")
        self.blocks = -(-(context + BLOCK) // BLOCK)
        weights = random_weights(spec, torch.bfloat16, 0, device)
        kv_shape = (spec.num_layers, rows * self.blocks, spec.num_kv_heads, 2, BLOCK, spec.head_dim)
        kv = torch.randn(kv_shape, dtype=torch.bfloat16, device=device)
        buffers = Buffers.allocate(spec, torch.bfloat16, device, tokens, max(rows, 64), context)
        self.decoder = CudaDecoder(spec, weights, kv, buffers, context)
        self.tables = torch.randperm(rows * self.blocks, device=device).int().view(rows, self.blocks)

    def decode(self, rows: int, context: int) -> DeviceStep:
        position = context - 1
        slots = self.tables[:rows, position // BLOCK] * BLOCK + position % BLOCK
        return DeviceStep(
            token_ids=self._tokens(rows),
            positions=_ints([position] * rows),
            slots=slots.contiguous(),
            tables=self.tables,
            table_rows=_ints(list(range(rows))),
            num_decodes=rows,
            num_logits=rows,
        )

    def prompts(self, count: int, length: int) -> DeviceStep:
        spec = self.spec
        tile = tile_tokens_of(spec.num_heads, spec.num_kv_heads, spec.head_dim, torch.bfloat16)
        rows = list(range(count))
        plan = plan_prefill([length] * count, [length] * count, tile, table_rows=rows, first_token=0)
        positions = torch.arange(length, dtype=torch.int32, device="cuda").repeat(count)
        blocks = self.tables[:count].repeat_interleave(BLOCK, 1)[:, :length].flatten()
        return DeviceStep(
            token_ids=self._tokens(count * length),
            positions=positions,
            slots=(blocks * BLOCK + positions % BLOCK).int(),
            tables=self.tables,
            table_rows=_ints([]),
            num_decodes=0,
            num_logits=count,
            logit_rows=_ints([length * (row + 1) - 1 for row in rows]),
            prefill=plan.device_views(torch.from_numpy(plan.pack()).cuda()),
        )

    def _tokens(self, count: int) -> Tensor:
        return torch.randint(self.spec.vocab_size, (count,), device="cuda").int()


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> Spread:
    seconds = []
    for _ in range(3):
        graph.replay()
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return Spread.of(seconds)


def print_kernels(graph: torch.cuda.CUDAGraph, layers: int, top: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_time_total > 0:
            spent[event.name].append(event.device_time_total)
    total = sum(sum(each) for each in spent.values()) / 5
    print(f"    kernels {total:.0f} µs a step")
    for name, each in sorted(spent.items(), key=lambda item: -sum(item[1]))[:top]:
        per_layer = sum(each) / 5 / layers
        times = f"{len(each) / 5 / layers:5.2f} × {statistics.median(each):8.2f}"
        print(f"    {per_layer:8.2f} µs a layer  {times}  {name[:80]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", default="1,64", help="decode batches, by comma")
    parser.add_argument("--context", default="640,1152", help="tokens of each row of these batches, by comma")
    parser.add_argument("--prompts", default="", help="prompt steps as COUNTxTOKENS, by comma")
    parser.add_argument("--top", type=int, default=0, help="print this many kernels of each step (default 0)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    batches = (
        [(int(a), int(b)) for a, b in zip(args.rows.split(","), args.context.split(","), strict=True)]
        if args.rows
        else []
    )
    prompts = [tuple(map(int, each.split("x"))) for each in args.prompts.split(",") if each]
    with tempfile.TemporaryDirectory() as folder:
        spec = read_spec(write_config(args.model, Path(folder)))
    spec = replace(spec, layers=spec.layers[: args.layers])
    torch.manual_seed(0)
    with torch.inference_mode():
        context = max([*(b for _, b in batches), *(b for _, b in prompts)])
        rows = max([*(a for a, _ in batches), *(a for a, _ in prompts)])
        steps = Steps(spec, max([rows, *(a * b for a, b in prompts)]), rows, context)
        work = [(f"decode {a} × {b}", steps.decode(a, b), Record.decodes(a, b)) for a, b in batches]
        work += [(f"prompts {a} × {b}", steps.prompts(a, b), Record.prompts(a, b)) for a, b in prompts]
        found = []
        for name, step, record in work:
            graph = captured(lambda step=step: steps.decoder.forward(step))  # type: ignore[misc]
            head = captured(lambda step=step: steps.decoder.head(step))  # type: ignore[misc]
            whole, last = replay_seconds(graph, args.repeats), replay_seconds(head, args.repeats)
            limit_s = step_limit_seconds(spec, record)
            found.append(Measured(name, spec.num_layers, whole, last, limit_s))
            print(found[-1], flush=True)
            if args.top:
                print_kernels(graph, spec.num_layers, args.top)
    if args.json:
        figures = [each.as_json() for each in found]
        args.json.write_text(json.dumps({"model": args.model, "steps": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
