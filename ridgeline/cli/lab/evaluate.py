"""`ridgeline evaluate`: a model's quality on tasks; `gate` and `compare` stand beside it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ridgeline.cli.parsing import Verbs, add_subverb, add_verb, path_argument
from ridgeline.cli.rag.evaluate import add_evaluation, run_eval
from ridgeline.cli.source import API_KEY_VARIABLE
from ridgeline.engine.errors import EngineError
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.evaluate.options import EvaluateOptions, GateOptions
from ridgeline.models.errors import ModelError
from ridgeline.options import add_flags, build, given_flags
from ridgeline.telemetry import logs

RESULTS = Path("evaluate-results")
GATE_FAILED, GATE_NOT_RUN = 1, 2
SUBJECT_HELP = (
    "a model (short name, folder, .gguf, org/name) or the URL of a server; settings follow with commas: "
    "smollm2-135m,weights=int8 or http://127.0.0.1:8000,model=NAME"
)

DESCRIPTION = """\
Measure a model's quality on tasks: perplexity, multiple choice, last words, arithmetic, programs, and your
own JSONL files, with lm-eval's definitions. The subject is a model, loaded here, or any OpenAI-compatible
server. Tasks that are scored by log-probability need a server that returns those of a prompt. Outcomes are
stored item by item: the same command continues after an interruption.

`evaluate gate` compares a candidate with a reference and fails if it is worse than the noise. `evaluate
compare` puts several models on one Pareto picture. `evaluate retrieval` measures a vector store."""

EXAMPLES = """\
  ridgeline evaluate smollm2-135m --tasks perplexity,arc_easy --limit 100 --data ~/data
  ridgeline evaluate smollm2-135m,weights=int8 --tasks mine.jsonl
  ridgeline evaluate http://127.0.0.1:8000 --tasks gsm8k,humaneval --concurrency 32
  ridgeline evaluate gate --reference smollm2-135m --candidate smollm2-135m,weights=int4
  ridgeline evaluate compare smollm2-135m smollm2-135m,weights=int8 --usd-per-hour 0.2
"""

GATE = """\
Compare a candidate with a reference on the same items. The reference runs twice: what changes between its two
runs is the noise floor. Accuracies are compared with McNemar's exact test and a non-inferiority margin, texts
by the KL divergence of the next-token distributions. Exit code: 0 passed, 1 the difference is outside the
noise floor and the margins, 2 wrong usage or a run that failed."""

GATE_EXAMPLES = """\
  ridgeline evaluate gate --reference smollm2-135m --candidate smollm2-135m,weights=int4 --limit 200
  ridgeline evaluate gate --reference Qwen/Qwen3-8B --candidate ./qwen3-8b-int4 --kl-margin 0.035
  ridgeline evaluate gate --reference http://a:8000 --candidate http://b:8000 --tasks gsm8k --margin 2
"""

COMPARE = """\
Evaluate several models on the same tasks, and put quality, tokens per second, memory and price on one Pareto
picture. Models are loaded one after the other."""

COMPARE_EXAMPLES = """\
  ridgeline evaluate compare smollm2-135m smollm2-135m,weights=int8 --tasks arc_easy --limit 200
  ridgeline evaluate compare Qwen/Qwen3-8B Qwen/Qwen3-4B --hardware h200
"""


RETRIEVAL = """\
Measure the search of a vector store, and answers from it, with your own questions. Each line of the file is
{"question": …, "relevant": ["tea.md", …] or {"tea.md": 2, …}, "answer": …}; `answer` is optional. Printed are
nDCG@10, recall and MRR of vector, text and hybrid search; with --answers also how faithful answers are."""

RETRIEVAL_EXAMPLES = """\
  ridgeline evaluate retrieval questions.jsonl --url http://127.0.0.1:8000 --store manuals
  ridgeline evaluate retrieval questions.jsonl --store manuals --ranker maxsim --answers
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "evaluate", "measure a model's quality; gate a candidate", DESCRIPTION, EXAMPLES)
    parser.add_argument("subject", metavar="MODEL_OR_URL", help=SUBJECT_HELP)
    _add_common(parser)
    parser.set_defaults(run=run)
    gate = add_subverb(parser, "gate", GATE, GATE_EXAMPLES)
    gate.add_argument("--reference", required=True, metavar="SUBJECT", help=SUBJECT_HELP)
    gate.add_argument("--candidate", required=True, metavar="SUBJECT", help="as --reference")
    add_flags(gate, "gate", GateOptions, title="the gate")
    _add_common(gate)
    gate.set_defaults(run=run_gate)
    compare = add_subverb(parser, "compare", COMPARE, COMPARE_EXAMPLES)
    compare.add_argument("subjects", nargs="+", metavar="SUBJECT", help=SUBJECT_HELP)
    compare.add_argument("--usd-per-hour", "--price", type=float, metavar="USD", help="cost of an hour")
    compare.add_argument(
        "--hardware", metavar="NAME", help="take the cost from the hardware table: h200, l4, …"
    )
    _add_common(compare)
    compare.set_defaults(run=run_compare)
    retrieval = add_subverb(parser, "retrieval", RETRIEVAL, RETRIEVAL_EXAMPLES)
    add_evaluation(retrieval)
    retrieval.set_defaults(run=run_eval)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", metavar="KEY", help=f"key for servers (default: ${API_KEY_VARIABLE})")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=path_argument,
        help=f"folder of the results; the same folder continues (default: {RESULTS}/NAME)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    add_flags(parser, "evaluate", EvaluateOptions, title="tasks")


def run(args: argparse.Namespace) -> int:
    from ridgeline.lab.evaluate.compare import plain_name
    from ridgeline.lab.evaluate.evaluation import SUMMARY, evaluate, load_tasks
    from ridgeline.lab.evaluate.progress import shown
    from ridgeline.lab.evaluate.reports.evaluation_page import evaluation_page
    from ridgeline.lab.evaluate.reports.text import evaluation_text
    from ridgeline.lab.evaluate.subjects.open import opened

    options = build(EvaluateOptions, given_flags(args, "evaluate"))
    folder = args.out or RESULTS / plain_name(args.subject)
    tasks, sizes = load_tasks(options)
    _fetch(args.subject)
    with shown(sys.stderr) as on_progress, opened(args.subject, _key(args)) as subject:
        found = evaluate(subject, tasks, sizes, options, folder, on_progress)
    _write(folder / "report.html", evaluation_page(found))
    print((folder / SUMMARY).read_text() if args.json else evaluation_text(found))
    print(f"kept in {folder}", file=sys.stderr)
    return 0


def run_gate(args: argparse.Namespace) -> int:
    """A gate that could not run must not look like one that failed: 2, not 1."""
    try:
        return _gate(args)
    except (LabError, ModelError, EngineError) as error:
        if args.debug:
            raise
        logs.fail(f"ridgeline: {error}")
        return GATE_NOT_RUN


def _gate(args: argparse.Namespace) -> int:
    from ridgeline.lab.evaluate.compare import plain_name
    from ridgeline.lab.evaluate.gate import RESULT
    from ridgeline.lab.evaluate.gate import run_gate as run_the_gate
    from ridgeline.lab.evaluate.progress import shown
    from ridgeline.lab.evaluate.reports.gate_page import gate_page
    from ridgeline.lab.evaluate.reports.text import gate_text
    from ridgeline.lab.evaluate.verdicts import append_verdict

    options = build(EvaluateOptions, given_flags(args, "evaluate"))
    gate = build(GateOptions, given_flags(args, "gate"))
    folder = args.out or RESULTS / f"gate-{plain_name(args.candidate)}"
    _fetch(args.reference, args.candidate)
    with shown(sys.stderr) as on_progress:
        found = run_the_gate(args.reference, args.candidate, options, gate, folder, on_progress, _key(args))
    found.save(folder)
    _write(folder / "gate.html", gate_page(found))
    print((folder / RESULT).read_text() if args.json else gate_text(found))
    print(f"kept in {folder}", file=sys.stderr)
    if found.verdict is not None:
        try:
            print(f"recorded for `ridgeline plan` in {append_verdict(found.verdict)}", file=sys.stderr)
        except OSError as error:
            print(f"not recorded for `ridgeline plan`: {error}", file=sys.stderr)
    else:
        print(f"not recorded for `ridgeline plan`: {found.not_recorded}", file=sys.stderr)
    return 0 if found.passed else GATE_FAILED


def run_compare(args: argparse.Namespace) -> int:
    from ridgeline.lab.evaluate.compare import RESULT, compare
    from ridgeline.lab.evaluate.progress import shown
    from ridgeline.lab.evaluate.reports.compare_page import comparison_page, comparison_text

    options = build(EvaluateOptions, given_flags(args, "evaluate"))
    folder = args.out or RESULTS / "compare"
    price = _usd_per_hour(args)
    _fetch(*args.subjects)
    with shown(sys.stderr) as on_progress:
        found = compare(args.subjects, options, folder, on_progress, usd_per_hour=price, api_key=_key(args))
    found.save(folder)
    _write(folder / "compare.html", comparison_page(found))
    print((folder / RESULT).read_text() if args.json else comparison_text(found))
    print(f"kept in {folder}", file=sys.stderr)
    return 0


def _usd_per_hour(args: argparse.Namespace) -> float | None:
    given: float | None = args.usd_per_hour
    if given is not None and args.hardware:
        raise BadInput("give --usd-per-hour or --hardware, not both")
    if given is not None and not given > 0:
        raise BadInput(f"--usd-per-hour must be above 0, got {given:g}")
    if not args.hardware:
        return given
    from ridgeline.lab.hardware.find_chip import find_chip

    found = find_chip(args.hardware)
    if found.usd_per_hour is None:
        raise BadInput(f"--hardware {args.hardware}: the table has no price for it; give --usd-per-hour")
    return found.usd_per_hour


def _fetch(*subjects: str) -> None:
    """Pull what is missing, with progress, before any work starts."""
    from ridgeline.cli.progress import fetch
    from ridgeline.lab.evaluate.subjects.subject import parse_subject

    for spec in map(parse_subject, subjects):
        if not spec.is_url:
            fetch(spec.name, sys.stderr)


def _key(args: argparse.Namespace) -> str:
    key: Any = args.api_key or os.environ.get(API_KEY_VARIABLE, "")
    return str(key)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
