"""`ridgeline gateway routes`: fits a route's artifact to examples; shows what routing saves on others."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.parsing import Verbs, add_verb, path_argument
from ridgeline.options import OptionError
from ridgeline.running import state_home

if TYPE_CHECKING:  # `ridgeline --help` imports nothing heavy
    from ridgeline.gateway.routing.embedder import Vectors
    from ridgeline.gateway.routing.learned.evaluation import Evaluation
    from ridgeline.gateway.routing.learned.examples import Costing
    from ridgeline.gateway.routing.learned.features import Recipe
    from ridgeline.gateway.routing.learned.fitting import Prepared
    from ridgeline.gateway.routing.learned.words import WordVectors

MODEL, MAX_TOKENS, QUALITY = "all-minilm-l6-v2", 48, 95.0
STATE_DIR = "~/.local/state/ridgeline/gateway"
STORE_S = 60.0  # for the ledger's answer

DESCRIPTION = """\
Learn from examples which requests the cheap model of a route answers as well as the strong one. `fit` writes
the artifact for a [[routes]] table of gateway.toml; `evaluate` shows what that would save, on held-back
examples, beside random choice, kNN and the oracle."""

EXAMPLES = """\
  ridgeline gateway routes evaluate examples.csv --models small,large
  ridgeline gateway routes fit examples.csv --models small,large --quality 95 --out route.npz
"""

FORMAT = """\
Examples are CSV files (columns: prompt, and one per model with true, false or a grade from 0 to 1; optional
columns: MODEL_cost, MODEL_response, MODEL_confidence, group) or JSON lines ({"prompt": …, "outcomes":
{MODEL: …}, "costs": {MODEL: …}, "group": …}; `messages` instead of `prompt` for conversations). Vectors come
from an embedding server, which the command starts if --embeddings-url is not given, and are stored in the
cache folder."""

FIT = f"""\
Fit neighbours and classifier, choose between them by cross-validation, calibrate, find the threshold, and
write all of it to one file.
{FORMAT}"""

FIT_EXAMPLES = """\
  ridgeline gateway routes fit examples.csv --models small,large --out route.npz
  ridgeline gateway routes fit a.jsonl b.jsonl --models mixtral,gpt-4 --names small,large --quality 90 \\
      --price mixtral=0.6/0.6 --price gpt-4=10/30 --out route.npz
"""

EVALUATE = f"""\
Fit on a part of the examples and judge on the rest: the savings at a quality, with intervals. With
--artifact, score an existing artifact on all examples instead.
{FORMAT}"""

EVALUATE_EXAMPLES = """\
  ridgeline gateway routes evaluate examples.csv --models small,large
  ridgeline gateway routes evaluate *.csv --models small,large --split groups --out router-results
  ridgeline gateway routes evaluate new.csv --artifact route.npz
"""

DECISIONS = """\
Show the decisions of a gateway's route, from its ledger: reasons, models, times, and for a shadow route how
often it agreed with the default and what it would have saved, estimated from the models' rows."""

DECISIONS_EXAMPLES = """\
  ridgeline gateway routes decisions auto
  ridgeline gateway routes decisions auto --days 7 --store postgresql://ridgeline@db/ridgeline
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "routes", "learn which requests a cheap model answers well", DESCRIPTION, EXAMPLES
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    fitter = add_verb(actions, "fit", "write a route's artifact", FIT, FIT_EXAMPLES)
    _add_shared(fitter)
    fitter.add_argument("--names", metavar="A,B", help="the models' names in the gateway (default: --models)")
    fitter.add_argument(
        "--out", type=path_argument, default=Path("route.npz"), metavar="FILE", help="default: route.npz"
    )
    fitter.set_defaults(run=run_fit)

    judge = add_verb(actions, "evaluate", "show what routing would save", EVALUATE, EVALUATE_EXAMPLES)
    _add_shared(judge, models="from the cheapest to the strongest (default: those of --artifact)")
    judge.add_argument(
        "--split",
        choices=("part", "folds", "groups"),
        default="part",
        help="hold back a random part, every row once (5 folds), or whole groups, each once (default: part)",
    )
    judge.add_argument(
        "--held-back",
        type=float,
        default=40.0,
        metavar="PERCENT",
        help="share of the rows to hold back, with part (default: 40)",
    )
    judge.add_argument(
        "--draws", type=int, default=1000, metavar="N", help="bootstrap samples (default: 1000)"
    )
    judge.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="number of splits into folds or groups (default: 1)",
    )
    judge.add_argument(
        "--artifact",
        type=path_argument,
        metavar="FILE",
        help="score this file of `gateway routes fit` on all examples; fit nothing",
    )
    judge.add_argument("--out", type=path_argument, metavar="DIR", help="folder for JSON, CSV and a page")
    judge.set_defaults(run=run_evaluate)

    teller = add_verb(
        actions, "decisions", "show a route's decisions, from the ledger", DECISIONS, DECISIONS_EXAMPLES
    )
    teller.add_argument("route", nargs="?", default="auto", metavar="ROUTE", help="default: auto")
    teller.add_argument(
        "--days", type=float, default=30.0, metavar="N", help="days to look back (default: 30)"
    )
    teller.add_argument("--store", default="", metavar="URL", help="postgresql://…, as in [store] url")
    teller.add_argument(
        "--state-dir", type=path_argument, metavar="DIR", help=f"the gateway's (default: {STATE_DIR})"
    )
    teller.set_defaults(run=run_decisions)


def _add_shared(parser: argparse.ArgumentParser, models: str = "") -> None:
    """models: help of --models if it is optional."""
    parser.add_argument("examples", nargs="+", type=path_argument, metavar="FILE", help="examples")
    help_text = models or "from the cheapest to the strongest"
    parser.add_argument("--models", required=not models, metavar="A,B", help=help_text)
    parser.add_argument(
        "--quality",
        type=float,
        default=QUALITY,
        metavar="PERCENT",
        help="share of the quality gap between the cheapest and the strongest model to keep (default: 95)",
    )
    parser.add_argument(
        "--cost",
        action="append",
        default=[],
        metavar="MODEL=USD",
        help="US dollars per request; may be repeated",
    )
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="MODEL=IN/OUT",
        help="US dollars per million tokens; may be repeated (default: calls are counted)",
    )
    parser.add_argument("--newest", type=int, metavar="N", help="use only the last N examples")
    parser.add_argument("--embeddings-url", metavar="URL", help="an embedding server (default: start one)")
    parser.add_argument("--embedding-model", default=MODEL, metavar="NAME", help=f"default: {MODEL}")
    parser.add_argument(
        "--vectors",
        choices=("words", "text"),
        default="words",
        help="words: the mean vector of a text's words, embedded once, here; a decision needs no server. "
        "text: embed the text's beginning for each decision (default: words)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help=f"with --vectors text: a decision takes time in proportion (default: {MAX_TOKENS})",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of folds and samples (default: 0)"
    )


def run_fit(args: argparse.Namespace) -> int:
    from ridgeline.gateway.routing.learned.artifact import save
    from ridgeline.gateway.routing.learned.fitting import fit_artifact

    names = args.names.split(",") if args.names else args.models.split(",")
    if not args.out.parent.is_dir():
        raise OptionError(f"--out: folder {args.out.parent} does not exist")
    gap = _share(args.quality, "--quality")
    with _progress() as report:
        recipe = _recipe(args)
        prepared, words = _prepared(args, recipe, report)
        artifact = fit_artifact(
            prepared,
            names=names,
            gap=gap,
            recipe=recipe,
            embedding_model=args.embedding_model,
            seed=args.seed,
            words=words,
            report=report,
        )
        save(artifact, args.out)
    found = artifact.report
    print(f"{found['examples']} examples; right: " + ", ".join(_rates(names, found["quality"])))
    print(
        f"classifier {found['classifier_share']:.0%}, {found['neighbours']} neighbours the rest; "
        f"calibration error {', '.join(f'{error:.3f}' for error in found['calibration_error'])}"
    )
    print(
        f"threshold {artifact.threshold:.4f}: keeps {found['gap_kept']:.1%} of the gap and saves "
        f"{found['cost_saved']:.1%} of the cost, on examples left out of each fit in turn"
    )
    if artifact.cascade_threshold is not None:
        print(f"cascade: answers below a confidence of {artifact.cascade_threshold:.3f} are asked again")
    print(f"wrote {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)")
    return 0


def run_evaluate(args: argparse.Namespace) -> int:
    from ridgeline.gateway.routing.learned.evaluation import evaluate
    from ridgeline.gateway.routing.learned.report import lines_of, write

    held_back, gap = _share(args.held_back, "--held-back"), _share(args.quality, "--quality")
    if args.draws < 1:
        raise OptionError(f"--draws must be 1 or more, got {args.draws}")
    if args.repeats < 1 or (args.split == "part" and args.repeats > 1):
        raise OptionError("--repeats must be 1 or more, and requires --split folds or groups")
    if args.artifact is None and args.models is None:
        raise OptionError("--models: list the models from the cheapest to the strongest, or give --artifact")
    with _progress() as report:
        if args.artifact is not None:
            found = _scored(args, gap, report)
        else:
            prepared, _ = _prepared(args, _recipe(args), report)
            found = evaluate(
                prepared,
                split=args.split,
                held_back=held_back,
                gap=gap,
                seed=args.seed,
                draws=args.draws,
                repeats=args.repeats,
                report=report,
            )
    print("\n".join(lines_of(found)))
    if args.out is not None:
        print("wrote " + ", ".join(map(str, write(found, args.out))))
    return 0


def _scored(args: argparse.Namespace, gap: float, report: Callable[[str], None]) -> Evaluation:
    """Score an artifact on the examples, with vectors made by its recipe."""
    from ridgeline.gateway.routing.learned.artifact import load
    from ridgeline.gateway.routing.learned.evaluation import score

    artifact = load(args.artifact)
    args.models = args.models or ",".join(artifact.models)
    if len(args.models.split(",")) != len(artifact.models):
        raise OptionError(f"--models: {args.artifact} chooses between {', '.join(artifact.models)}")
    args.embedding_model = artifact.embedding_model
    args.vectors = "text" if artifact.words is None else "words"
    prepared, _ = _prepared(args, artifact.recipe, report, artifact.words)
    return score(artifact, prepared, gap=gap, seed=args.seed, draws=args.draws)


def run_decisions(args: argparse.Namespace) -> int:
    from ridgeline.gateway.accounting.errors import LedgerError
    from ridgeline.gateway.accounting.store.places import sqlite_ledger, sqlite_path, store_at
    from ridgeline.gateway.accounting.store.table import LedgerStore
    from ridgeline.gateway.routing.decisions import decisions_of, lines_of, read_prices, read_rows

    state_dir = args.state_dir or state_home() / "gateway"
    since_ms = max(0, int((time.time() - args.days * 86_400) * 1e3))
    store: LedgerStore
    if args.store:
        store = store_at(args.store, state_dir, STORE_S)
    else:
        path = sqlite_path("", state_dir)
        if not path.exists():
            raise LedgerError(f"{path}: no such ledger; give --state-dir or --store")
        store = sqlite_ledger(path, STORE_S, read_only=True)
    try:
        found = decisions_of(read_rows(store, args.route, since_ms), read_prices(store, since_ms))
    finally:
        store.close()
    print("\n".join(lines_of(found, args.route)))
    return 0


def _prepared(
    args: argparse.Namespace,
    recipe: Recipe,
    report: Callable[[str], None],
    known: WordVectors | None = None,
) -> tuple[Prepared, WordVectors | None]:
    """known: the word vectors of an artifact; None: make them from the examples' words."""
    from ridgeline.gateway.routing.embedder import EmbeddingFailed
    from ridgeline.gateway.routing.learned.examples import read_examples
    from ridgeline.gateway.routing.learned.fitting import Prepared
    from ridgeline.gateway.routing.learned.vectors import Fetch, VectorServer, store_path, vectors_of
    from ridgeline.gateway.routing.learned.words import WORD_TOKENS, WordVectors
    from ridgeline.gateway.routing.own_server import OwnServer
    from ridgeline.machine import cache_dir

    examples = read_examples(args.examples, args.models.split(","), _costing(args), args.newest)
    texts = [recipe.text(turns) for turns in examples.turns]
    if known is not None:
        return Prepared.of(examples, known.many(texts)), known
    of_words = args.vectors == "words"
    max_tokens = WORD_TOKENS if of_words else recipe.max_tokens
    with OwnServer(args.embedding_model) as own:

        def fetch() -> Fetch:
            if not args.embeddings_url:
                report("starting an embedding server")
            url = args.embeddings_url or own.start()
            return VectorServer(url, args.embedding_model, max_tokens).fetch

        def embed(wanted: Sequence[str]) -> Vectors:
            store = store_path(cache_dir(), args.embedding_model, max_tokens)
            return vectors_of(wanted, store, fetch, lambda done, total: report(f"{done} of {total} vectors"))

        try:
            if not of_words:
                return Prepared.of(examples, embed(texts)), None
            words = WordVectors.of(texts, embed)
        except EmbeddingFailed as error:
            raise RemoteError(str(error)) from None
    return Prepared.of(examples, words.many(texts)), words


def _recipe(args: argparse.Namespace) -> Recipe:
    from ridgeline.gateway.routing.learned.features import Recipe
    from ridgeline.gateway.routing.learned.words import READ_CHARS

    max_tokens = args.max_tokens
    if not 8 <= max_tokens <= 8192:
        raise OptionError(f"--max-tokens must be 8 to 8192, got {max_tokens}")
    if args.vectors == "words":
        return Recipe(head_chars=READ_CHARS)
    return Recipe(head_chars=5 * max_tokens, max_tokens=max_tokens)


def _costing(args: argparse.Namespace) -> Costing:
    from ridgeline.gateway.routing.learned.examples import Costing, Price

    requests = {name: _number(text, "--cost") for name, text in _pairs(args.cost, "--cost")}
    prices = {}
    for name, text in _pairs(args.price, "--price"):
        given, slash, made = text.partition("/")
        if not slash:
            raise OptionError(f"--price {name}={text}: must be MODEL=IN/OUT, US dollars per million tokens")
        prices[name] = Price(_number(given, "--price"), _number(made, "--price"))
    return Costing(requests, prices)


def _pairs(given: Sequence[str], flag: str) -> Iterator[tuple[str, str]]:
    for text in given:
        name, equals, value = text.rpartition("=")
        if not equals or not name:
            raise OptionError(f"{flag} {text!r}: must be MODEL=…")
        yield name, value


def _number(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise OptionError(f"{flag}: {text!r} is not a number of US dollars")
    return value


def _share(percent: float, flag: str) -> float:
    if not 0 < percent < 100:
        raise OptionError(f"{flag} must be between 0 and 100 percent, got {percent:g}")
    return percent / 100


def _rates(names: Sequence[str], rates: Sequence[float]) -> list[str]:
    return [f"{name} {rate:.1%}" for name, rate in zip(names, rates, strict=True)]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A progress line on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("reading") as status:
        yield status.update
