"""`ridgeline train-drafter`: a draft head for a model, learned from the model's own answers."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ridgeline.cli.parsing import Verbs, add_verb, path_argument
from ridgeline.lab.errors import LabError
from ridgeline.lab.train_drafter.options import TrainOptions
from ridgeline.options import add_flags, build, given_flags

DESCRIPTION = """\
Train a draft head (EAGLE-3) for MODEL: one layer that guesses the next tokens from the model's hidden states.
`ridgeline serve MODEL --speculate DIR` verifies the guesses, several in a step; answers do not change.

The model first answers --prompts itself, as it does when it is served. The head learns from these answers,
and is then judged by greedy answers to prompts that it has not seen: the mean number of tokens of a verified
row. The folder gets config.json and model.safetensors in the layout of vLLM's speculators, and report.json.

A killed run continues when the same command is repeated. A GPU needs minutes; a CPU is for small trials."""

EXAMPLES = """\
  ridgeline train-drafter smollm2-135m --prompts questions.jsonl --out smollm2-eagle3
  ridgeline train-drafter Qwen/Qwen3-0.6B --prompts a.jsonl --held-out mt-bench.jsonl --out head
  ridgeline train-drafter smollm2-135m --samples 20000 --minutes 4 --device cuda --out smollm2-eagle3
  ridgeline serve smollm2-135m --backend cuda --speculate smollm2-eagle3
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "train-drafter", "train a draft head for a model", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "model", metavar="MODEL", help="short name, folder, .gguf file or org/name of the hub"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        type=path_argument,
        help="folder to write; new, or of a killed run",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_flags(parser, "train-drafter", TrainOptions, title="data and training")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = build(TrainOptions, given_flags(args, "train-drafter"))
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise LabError("train-drafter computes with torch: pip install 'ridgeline[torch]'") from None
    from ridgeline.cli.progress import fetch
    from ridgeline.lab.evaluate.progress import shown
    from ridgeline.lab.train_drafter.driver import report_text, train_drafter

    path = fetch(args.model, sys.stderr).path
    with shown(sys.stderr) as on_progress:
        report = train_drafter(args.model, path, args.out, options, on_progress)
    print(json.dumps(asdict(report)) if args.json else report_text(report, args.out))
    return 0
