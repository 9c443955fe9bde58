"""What structured output costs on a GPU: decoding at batch 16 under a schema and without, in turns.

Needs torch, triton, tokenizers and the grammar library, and a directory with a tokenizer and a config.json;
weights are random (`--weights` reads those of the directory or .gguf file). Answers under a small schema are
read back and checked first. Prints tokens per second and the ratio of neighbouring rounds.

    python benchmarks/gpu_structured.py ./Qwen3-8B [--rounds 4] [--tokens 200] [--weights] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.keywords import schema_grammar
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.start.build import build_engine
from ridgeline.models.text.tokenizer import Tokenizer

BATCH = 16
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "minItems": 500, "items": PERSON}  # does not end soon
SAMPLING = {"greedy": 0.0, "temperature 1": 1.0}
_names = itertools.count()


def main() -> None:
    arguments = parsed()
    load = "auto" if arguments.weights else "dummy"
    config = EngineConfig(
        model=str(arguments.model), backend="cuda", max_running=64, kv_tokens=65_536, load_format=load
    )
    core = build_engine(config, arguments.model).core
    tokenizer = Tokenizer.load(arguments.model)
    prompts = [tokenizer.encode(f"People, list number {i}, as JSON:\n") for i in range(BATCH)]
    check_answers(core, tokenizer, prompts)
    people = schema_grammar(PEOPLE)
    report: dict[str, Any] = {}
    for name, temperature in SAMPLING.items():
        free, bound = [], []
        for number in range(arguments.rounds + 1):
            for rates, grammar in ((free, None), (bound, people)):
                rate = decode_rate(core, prompts, temperature, grammar, arguments.tokens)
                if number:  # the first round warms up
                    rates.append(rate)
        ratios = [with_it / without for without, with_it in zip(free, bound, strict=True)]
        report[name] = {"free": free, "constrained": bound, "ratios": ratios}
        print(
            f"{name:14} free {statistics.median(free):8,.0f} tok/s · under the schema "
            f"{statistics.median(bound):8,.0f} · ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def check_answers(core: EngineCore, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    grammar = schema_grammar(PERSON)
    params = [SamplingParams(max_tokens=200, seed=i, grammar=grammar) for i in range(BATCH)]
    for tokens in run(core, prompts, params)[0].values():
        assert json.loads(tokenizer.decode(tokens))["age"] <= 150


def decode_rate(
    core: EngineCore, prompts: list[list[int]], temperature: float, grammar: Grammar | None, tokens: int
) -> float:
    params = [
        SamplingParams(
            max_tokens=tokens, temperature=temperature, seed=i, grammar=grammar, ignore_eos=grammar is None
        )
        for i in range(BATCH)
    ]
    return run(core, prompts, params)[1]


def run(
    core: EngineCore, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[dict[str, list[int]], float]:
    """All answers, and tokens per second from the moment that every sequence has its first."""
    for prompt, param in zip(prompts, params, strict=True):
        core.add(Request(f"r{next(_names)}", prompt, param, time.monotonic()))
    answers: dict[str, list[int]] = {}
    began, since = 0.0, 0
    while core.has_work or len(answers) < len(
        params
    ):  # requests whose grammar still compiles are not counted
        for _, error in core.admit_compiled():
            raise error
        for delta in core.step() if core.has_work else ():
            assert delta.error is None, delta.error
            answers.setdefault(delta.request_id, []).extend(delta.tokens)
            since += len(delta.tokens)
        if not began and len(answers) == len(params):
            began, since = time.monotonic(), 0
    return answers, since / (time.monotonic() - began)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--weights", action="store_true", help="read the weights instead of making some up")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
