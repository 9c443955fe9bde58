"""What structured output costs: decoding at batch 16 with and without a schema; steps while schemas compile.

Rounds of both kinds alternate within one run, and the ratio is that of neighbours, so that the machine's
noise is in the spread and not in the ratio. Prints a table and writes JSON.

    python benchmarks/structured_output.py [--model smollm2-135m] [--repeats 15] [--json FILE] [--no-compile]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from rich.console import Console
from rich.table import Table

from ridgeline import LLM, AsyncClient, SamplingParams, __version__
from ridgeline.engine.client.inbox import Inbox
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.keywords import schema_grammar
from ridgeline.models.files.pull import ensure

BATCH = 16
TOKENS = 40
WARM_STEPS = 4  # of a round: the prompts, and the first tokens
PROMPT = "Write a long list of people with their names, ages, cities and what they like, as JSON:\n"
SAMPLING = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0}, "top-p 0.9": {"top_p": 0.9}}
COMPILE_ROUNDS = 4
SUBMITS = 6  # requests of a round, each with its own schema or with none
PAUSE_S = 0.25


def records_schema(size: int, serial: int = 0) -> dict[str, Any]:
    """A list of records that does not end soon; about `size` bytes as JSON."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "city": {"type": "string", "maxLength": 30},
            "likes": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "city", "likes"],
        "additionalProperties": False,
    }
    others: dict[str, Any] = {}
    schema = {"type": "array", "minItems": 500, "items": person}
    while len(json.dumps(schema)) < size:
        kind = f"kind_{serial}_{len(others)}"
        others[kind] = {
            "type": "object",
            "properties": {kind: {"type": "string", "maxLength": 40}, "value": {"type": "number"}},
            "required": [kind],
            "additionalProperties": False,
        }
        schema["items"] = {"anyOf": [person, *others.values()]}
    return schema


@dataclass
class Pairs:
    """Neighbouring rounds: milliseconds per step without and with the grammar."""

    name: str
    free_ms: list[float] = field(default_factory=list)
    bound_ms: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        ratios = [bound / free for free, bound in zip(self.free_ms, self.bound_ms, strict=True)]
        return {
            "name": self.name,
            "free_ms": statistics.median(self.free_ms),
            "bound_ms": statistics.median(self.bound_ms),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "rounds": len(ratios),
        }


# ---- decoding ----


def measure_decoding(model: str, repeats: int) -> list[Pairs]:
    llm = LLM(model, kv_tokens=16_384)
    grammar = schema_grammar(records_schema(10_000))
    pairs = {name: Pairs(name) for name in SAMPLING}
    for repeat in range(repeats + 1):
        for name, sampling in SAMPLING.items():
            free, bound = _round_ms(llm, sampling, None), _round_ms(llm, sampling, grammar)
            if repeat:  # the first warms up
                pairs[name].free_ms.append(free)
                pairs[name].bound_ms.append(bound)
    return list(pairs.values())


def _round_ms(llm: LLM, sampling: dict[str, Any], grammar: Grammar | None) -> float:
    """The median step of a full batch."""
    last = llm.engine.core.scheduler.counters.steps
    params = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=i, grammar=grammar, **sampling)
        for i in range(BATCH)
    ]
    llm.generate([PROMPT] * BATCH, params)
    steps = [step for step in llm.engine.core.steps.dump() if step.step_id >= last + WARM_STEPS]
    full = [1000 * step.wall_s for step in steps if step.decode_batch == BATCH and not step.prefill_tokens]
    assert len(full) > TOKENS // 2, "the batch was not full: a constrained answer ended early"
    return statistics.median(full)


# ---- compiling beside the steps ----


async def measure_compiling(model: str) -> dict[str, Any]:
    """The steps of 15 streams while requests come that bring a schema of 10 kB each, or none."""
    with_schema: list[float] = []
    without: list[float] = []
    serial = 0
    async with await AsyncClient.start(str(ensure(model).path), kv_tokens=32_768) as client:
        await _submit(client, Inbox(whole=True), schema_grammar({"type": "object"}))  # the trial starts
        for _ in range(COMPILE_ROUNDS):
            for gaps in (without, with_schema):
                streams = _open_streams(client)
                await asyncio.sleep(1.0)
                begun = (await client.dump_steps())[-1].step_id
                for _ in range(SUBMITS):
                    serial += 1
                    grammar = schema_grammar(records_schema(10_000, serial)) if gaps is with_schema else None
                    await _submit(client, Inbox(whole=True), grammar)
                    await asyncio.sleep(PAUSE_S)
                steps = [step for step in await client.dump_steps() if step.step_id >= begun]
                ends = [step.start + step.schedule_s + step.wall_s for step in steps]
                gaps += [1000 * (later - earlier) for earlier, later in itertools.pairwise(ends)]
                for stream in streams:
                    stream.close()
    return {"without": _spread(without), "with": _spread(with_schema)}


def _open_streams(client: AsyncClient) -> list[Any]:
    prompt = client.tokenizer.encode(PROMPT)
    params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
    return [client.submit(prompt, params, Inbox()) for _ in range(BATCH - 1)]


async def _submit(client: AsyncClient, inbox: Inbox, grammar: Grammar | None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, grammar=grammar)
    request = client.submit(client.tokenizer.encode(PROMPT), params, inbox)
    while await inbox.take() is not None:
        pass
    request.close()


def _spread(gaps_ms: list[float]) -> dict[str, float]:
    ordered = sorted(gaps_ms)
    return {
        "steps": len(ordered),
        "median_ms": statistics.median(ordered),
        "p99_ms": ordered[int(0.99 * len(ordered))],
        "longest_ms": ordered[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-compile", action="store_true", help="leave out the steps while schemas compile")
    args = parser.parse_args()
    figures = [pairs.as_dict() for pairs in measure_decoding(args.model, args.repeats)]
    console = Console()
    table = Table("batch 16, a schema of 10 kB", "free, ms/step", "bound, ms/step", "ratio", "spread")
    for one in figures:
        spread = f"{one['ratio_min']:.3f} – {one['ratio_max']:.3f}"
        table.add_row(
            one["name"], f"{one['free_ms']:.2f}", f"{one['bound_ms']:.2f}", f"{one['ratio']:.3f}", spread
        )
    console.print(table)
    compiling = None if args.no_compile else asyncio.run(measure_compiling(args.model))
    if compiling is not None:
        table = Table("step to step, 15 streams", "steps", "median, ms", "p99, ms", "longest, ms")
        for name, spread in compiling.items():
            label = f"{name} schemas of 10 kB"
            figures_ms = (f"{spread[key]:.1f}" for key in ("median_ms", "p99_ms", "longest_ms"))
            table.add_row(label, str(spread["steps"]), *figures_ms)
        console.print(table)
    if args.json:
        result = {"version": __version__, "decoding": figures, "compiling": compiling}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
