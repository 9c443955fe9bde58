"""What verifying guesses gains on a GPU: tokens per second with guesses and without, by number of streams.

    python benchmarks/gpu_speculation.py                     8B shape, random weights, synthetic acceptance
    python benchmarks/gpu_speculation.py --streams 1,64,256 --rounds 3 --json result.json
    python benchmarks/gpu_speculation.py --model smollm2-135m --head DIR --prompts questions.jsonl

With random weights no guess would be right. So the guesses are any tokens, and as many of a row are taken as
right as the rates of --accepted say (0.73, 0.52, 0.35: 2.6 tokens a row): the device does all the work of
verifying, and the rates alone are made up. Whether a step has guesses is decided as in serving. Rounds with
and without alternate; figures are output tokens per second of the whole run, prompts of 128 tokens included,
the median and the range of the ratio. Needs a CUDA GPU, torch and triton.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.workloads import SHAPES, write_config
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.step import Sampled, StepPlan, StepRow
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.start.build import build_engine

BARS = {1: "520 tok/s", 64: "1.6 of off", 256: "0.98 of off"}
PROMPT, OUTPUT = 128, 256


class AnyTokens:
    name = "synthetic"
    waits = True

    def __init__(self, length: int) -> None:
        self.longest = length

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        return [Draft([7 + n for n in range(min(most, self.longest))]) for _ in seqs]

    def observe(self, plan: StepPlan, reads: bool) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def passes(self, length: int) -> int:
        return length

    def behind(self, seq: Sequence) -> int | None:
        return 0

    def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
        return 0


def accept_by_rates(rates: list[float]) -> None:
    """Replace the comparison of guesses and tokens in the runner."""
    from ridgeline.engine.run.cuda import runner

    rng = random.Random(0)

    def taken(row: StepRow, picks: list[Any], samples: list[Sampled]) -> list[Sampled]:
        draw = rng.random()
        right = sum(draw < rate for rate in rates[: len(row.drafts)])
        last = min(right, len(samples) - 1)
        return [Sampled(draft) for draft in row.drafts[:right]] + [Sampled(samples[last].token)]

    runner.until_wrong = taken  # type: ignore[assignment]


def run(core: Any, prompts: list[list[int]], output: int, temperature: float) -> tuple[float, int]:
    """Seconds and tokens."""
    core.scheduler.reset_prefix_cache()
    began = time.monotonic()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=output, temperature=temperature, ignore_eos=True, seed=number)
        core.add(Request(f"{began}-{number}", prompt, params, began))
    tokens = 0
    while core.has_work:
        for delta in core.step():
            if delta.error is not None:
                raise RuntimeError(delta.error)
            tokens += len(delta.tokens)
    return time.monotonic() - began, tokens


def compare(
    core: Any,
    speculation: Speculation,
    prompts: list[list[int]],
    rounds: int,
    output: int,
    temperature: float,
) -> dict[str, Any]:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds + 1):  # the first round compiles kernels and captures graphs
        for is_on in (False, True) if turn % 2 else (True, False):
            core.speculation = speculation if is_on else None
            seconds, tokens = run(core, prompts, output, temperature)
            if turn:
                rates[is_on].append(tokens / seconds)
    ratios = [on / off for off, on in zip(rates[False], rates[True], strict=True)]
    stats = speculation.stats()
    return {
        "streams": len(prompts),
        "off_tokens_per_s": round(statistics.median(rates[False])),
        "on_tokens_per_s": round(statistics.median(rates[True])),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
        "bar": BARS.get(len(prompts)),
        "tokens_per_verified_row": round(1 + stats.accepted / max(1, stats.drafts), 2),
        "predicted_gain": round(stats.predicted_gain, 2),
        "measured_gain": round(stats.measured_gain, 2),
        "draft_s": round(stats.draft_s, 3),
        "verify_s": round(stats.verify_s, 3),
        "steps": stats.steps,
        "off": stats.off,
    }


def synthetic(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(model=args.shape, backend="cuda", load_format="dummy", speculate="off")
        built = build_engine(config, write_config(args.shape, Path(folder)))
    accept_by_rates(args.accepted)
    found = []
    for streams in args.streams:
        rng = random.Random(streams)
        prompts = [[rng.randrange(100, 150_000) for _ in range(PROMPT)] for _ in range(streams)]
        speculation = Speculation(AnyTokens(len(args.accepted)), built.spec.vocab_size)
        found.append(compare(built.core, speculation, prompts, args.rounds, OUTPUT, 0.6))
        print(json.dumps(found[-1]), flush=True)
    return found


def with_head(args: argparse.Namespace) -> list[dict[str, Any]]:
    from ridgeline import LLM
    from ridgeline.lab.train_drafter.answers import prompt_ids, read_prompts

    llm = LLM(args.model, backend="cuda", speculate=str(args.head))
    core = llm.engine.core
    speculation = core.speculation
    texts = read_prompts((str(args.prompts),))[: args.questions]
    prompts = [prompt_ids(llm.tokenizer, text) for text in texts]
    rates: dict[bool, list[float]] = {False: [], True: []}
    different = 0
    for turn in range(args.rounds + 1):
        answers: dict[bool, list[list[int]]] = {}
        for is_on in (False, True) if turn % 2 else (True, False):
            core.speculation = speculation if is_on else None
            core.scheduler.reset_prefix_cache()
            seconds, answers[is_on] = 0.0, []
            for prompt in prompts:
                (one,) = llm.generate([prompt], SamplingParams(max_tokens=128, temperature=0.0))
                times = one.completions[0].timing.token_times
                seconds += times[-1] - times[0]
                answers[is_on].append(one.completions[0].tokens)
            if turn:
                rates[is_on].append(sum(len(each) - 1 for each in answers[is_on]) / seconds)
        different += sum(a != b for a, b in zip(answers[False], answers[True], strict=True))
    stats = speculation.stats()
    ratios = [on / off for off, on in zip(rates[False], rates[True], strict=True)]
    found = {
        "model": args.model,
        "off_tokens_per_s": round(statistics.median(rates[False])),
        "on_tokens_per_s": round(statistics.median(rates[True])),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
        "different_answers": different,
        "answers": len(prompts) * (args.rounds + 1),
        "tokens_per_verified_row": round(1 + stats.accepted / max(1, stats.drafts), 2),
        "accepted_by_position": stats.accepted_by_position[:8],
        "drafted_by_position": stats.drafted_by_position[:8],
        "draft_ms_per_step": round(1e3 * stats.draft_s / max(1, stats.steps), 3),
        "measured_gain": round(stats.measured_gain, 2),
        "off": stats.off,
    }
    print(json.dumps(found), flush=True)
    return [found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument(
        "--streams", type=lambda text: [int(one) for one in text.split(",")], default=[1, 64, 256]
    )
    parser.add_argument(
        "--accepted", type=lambda text: [float(one) for one in text.split(",")], default=[0.73, 0.52, 0.35]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--head", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = with_head(args) if args.head else synthetic(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
