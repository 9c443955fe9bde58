"""`ridgeline rag add|ask|eval|list|remove`: answers from your own files, by a running server."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ridgeline.cli.parsing import Verbs, add_verb, path_argument
from ridgeline.cli.rag.evaluate import add_evaluation, run_eval
from ridgeline.cli.rag.progress import counted
from ridgeline.cli.rag.server import add_server, add_url, client_of, store_of, told
from ridgeline.cli.rag.shown import cited, explained, found_lines
from ridgeline.options import OptionError

DESCRIPTION = """\
Answer questions from your own files. A server with a chat model and an embedding model keeps them in a vector
store: `ridgeline serve smollm2-135m all-minilm-l6-v2`. A gateway works as well, with a key."""

EXAMPLES = """\
  ridgeline rag add docs/ notes.md paper.pdf
  ridgeline rag ask "How is a model quantized?"
  ridgeline rag ask "What changed?" --filter '{"type": "eq", "key": "year", "value": 2026}' --explain
  ridgeline rag eval questions.jsonl --answers
  ridgeline rag list
"""

ADD = """\
Upload files and make them searchable. Folders are read with all folders in them; hidden files and unknown
kinds are left out. A file that is there already and has not changed is skipped, and one that has changed is
replaced: after a stop, the same command continues. Exit code 1 if a file could not be read."""
ADD_EXAMPLES = """\
  ridgeline rag add docs/ paper.pdf
  ridgeline rag add --store manuals --attribute year=2026 --attribute kind=manual manuals/*.md
  ridgeline rag add src/ --chunking code --chunk-tokens 400 --overlap-tokens 0
"""

ASK = """\
Ask a question: the server searches the store, and its model answers from what was found. Below the answer
stands each citation: the file, the line, and the words, which are compared with the file's text."""
ASK_EXAMPLES = """\
  ridgeline rag ask "Is black tea oxidised?"
  ridgeline rag ask "Is black tea oxidised?" --search-only --explain
  ridgeline rag ask "Is black tea oxidised?" --ranker maxsim --json
"""

EVAL = """\
Measure a store with your own questions: nDCG@10, recall and MRR of vector, text and hybrid search, and with
--answers how faithful answers are to the passages. Each line of the file is
{"question": …, "relevant": ["tea.md", …] or {"tea.md": 2, …}, "answer": …}; `answer` is optional.
The same as `ridgeline evaluate retrieval`."""
EVAL_EXAMPLES = """\
  ridgeline rag eval questions.jsonl
  ridgeline rag eval questions.jsonl --store manuals --ranker maxsim --answers --out results.jsonl
"""

LIST = "The vector stores: files, bytes, state."
REMOVE = "Remove a vector store and the files that `rag add` uploaded for it."


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "rag", "answer questions from your own files", DESCRIPTION, EXAMPLES)
    actions: Verbs = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    add = add_verb(actions, "add", "make files searchable", ADD, ADD_EXAMPLES)
    add.add_argument("paths", nargs="+", metavar="FILE", type=path_argument, help="files or folders")
    add_server(add)
    add.add_argument(
        "--attribute",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="that filters see; may be repeated",
    )
    add.add_argument(
        "--chunking",
        choices=("kind", "auto", "tokens", "sentences", "markdown", "code"),
        default="kind",
        help="how files are cut; kind: by the kind of each file; auto: OpenAI's 800 tokens (default: kind)",
    )
    add.add_argument(
        "--chunk-tokens", type=int, default=250, metavar="N", help="most tokens of a chunk (250)"
    )
    add.add_argument(
        "--overlap-tokens", type=int, default=50, metavar="N", help="tokens that neighbours share (50)"
    )
    add.add_argument(
        "--dimensions",
        type=int,
        metavar="N",
        help="of a new store: keep the first N numbers of vectors; for models trained for it (default: all)",
    )
    add.set_defaults(run=run_add)

    ask = add_verb(actions, "ask", "answer a question", ASK, ASK_EXAMPLES)
    ask.add_argument("question", metavar="QUESTION")
    add_server(ask)
    _add_search(ask)
    ask.add_argument("-k", type=int, default=8, metavar="N", help="most passages (8)")
    ask.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="most tokens of the answer (512)"
    )
    ask.add_argument("--temperature", type=float, metavar="X", help="default: the model's own")
    ask.add_argument("--search-only", action="store_true", help="print what is found, and no answer")
    ask.add_argument("--explain", action="store_true", help="say of each candidate what each leg said")
    ask.add_argument("--json", action="store_true", help="print JSON")
    ask.set_defaults(run=run_ask)

    evaluate = add_verb(actions, "eval", "measure search and answers", EVAL, EVAL_EXAMPLES)
    add_evaluation(evaluate)
    evaluate.set_defaults(run=run_eval)

    shown = add_verb(actions, "list", "list the stores", LIST, "  ridgeline rag list\n")
    add_url(shown)
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.set_defaults(run=run_list)

    remove = add_verb(actions, "remove", "remove a store", REMOVE, "  ridgeline rag remove manuals\n")
    remove.add_argument("store", metavar="STORE", help="name or id")
    add_url(remove)
    remove.set_defaults(run=run_remove)


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", metavar="MODEL", help="the chat model (default: the server's first)")
    parser.add_argument(
        "--filter", metavar="JSON", help="only files whose attributes match, as OpenAI's filters"
    )
    parser.add_argument(
        "--ranker",
        metavar="NAME",
        help="reorder what is found: maxsim, likelihood or a served cross-encoder",
    )
    parser.add_argument(
        "--weights", metavar="V,T", help="of vector and text search; 1,0 is vectors alone (default: 1,1)"
    )


# ── actions ──────────────────────────────────────────────────────────────────────────────────────────────


def run_add(args: argparse.Namespace) -> int:
    from ridgeline.cli.rag.addition import Addition
    from ridgeline.cli.rag.files import found_files, strategy_of

    attributes = _attributes(args.attribute)
    if not 100 <= args.chunk_tokens <= 4096:
        raise OptionError(f"--chunk-tokens must be 100 to 4096, got {args.chunk_tokens}")
    if not 0 <= 2 * args.overlap_tokens <= args.chunk_tokens:
        raise OptionError(f"--overlap-tokens must be 0 to half of --chunk-tokens, got {args.overlap_tokens}")
    files = found_files(args.paths)
    client = client_of(args)
    with told(args.url):
        store = client.store(args.store) or client.create_store(args.store, args.dimensions)
        if args.dimensions not in (None, kept := store.get("dimensions")):
            raise OptionError(
                f"--dimensions {args.dimensions}: the store {args.store!r} keeps {kept or 'all'} dimensions; "
                "a store's dimensions never change: give another --store"
            )
        addition = Addition(
            client,
            store["id"],
            attributes,
            lambda name: strategy_of(name, args.chunking, args.chunk_tokens, args.overlap_tokens),
        )
        with counted(sys.stderr, "uploaded", len(files)) as report:
            addition.upload(files, report)
        with counted(sys.stderr, "searchable", addition.total) as report:
            failed = addition.wait(lambda done, work: report(done, detail=work))
        for one in failed:
            reason = one["last_error"]["message"] if one["last_error"] else f"is {one['status']}"
            print(f"{addition.path_of(one)}: {reason}", file=sys.stderr)
    parts = [f"{addition.total - len(failed)} files are searchable in {args.store!r}"]
    parts += [f"{addition.skipped} had not changed"] if addition.skipped else []
    parts += [f"{len(failed)} could not be read"] if failed else []
    print("; ".join(parts))
    return 1 if failed else 0


def run_ask(args: argparse.Namespace) -> int:
    client = client_of(args)
    how: dict[str, Any] = {
        "filters": _filter(args.filter),
        "weights": _weights(args.weights),
        "ranker": args.ranker,
    }
    with told(args.url):
        store = store_of(client, args.store)
        if args.search_only or args.explain:
            answer = client.search(store["id"], args.question, k=args.k, explain=args.explain, **how)
            if args.json and args.search_only:
                print(json.dumps([_plain(one) for one in (*answer.found, *answer.left_out)], indent=2))
                return 0
            if not args.json:
                print(explained(answer) if args.explain else found_lines(answer.found))
            if args.search_only:
                return 0 if answer.found else 1
        live = (lambda text: print(text, end="", flush=True)) if not args.json else (lambda text: None)
        said = client.ask(
            [store["id"]],
            args.question,
            model=args.model,
            k=args.k,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            on_text=live,
            **how,
        )
        if args.json:
            print(json.dumps(_plain(said), indent=2))
        else:
            print("\n" + cited(client, said))
    return 0


def run_list(args: argparse.Namespace) -> int:
    with told(args.url):
        stores = list(client_of(args).stores())
    if args.json:
        print(json.dumps(stores, indent=2))
        return 0
    if not stores:
        print("There is no vector store: `ridgeline rag add FILE`.")
    for one in stores:
        counts = one["file_counts"]
        state = one["status"] if not counts["failed"] else f"{one['status']}, {counts['failed']} failed"
        size = f"{counts['total']:>6} files {one['usage_bytes'] / 1e6:>9.1f} MB"
        print(f"{one['name'] or '-':<20} {size}  {state}  {one['id']}")
    return 0


def run_remove(args: argparse.Namespace) -> int:
    client = client_of(args)
    with told(args.url):
        store = store_of(client, args.store)
        own = [one["id"] for one in client.files(store["id"]) if "sha256" in one["attributes"]]
        client.delete_store(store["id"])
        for id in own:
            client.delete_file(id)
    print(f"removed {args.store!r} and {len(own)} files")
    return 0


# ── values of flags ──────────────────────────────────────────────────────────────────────────────────────


def _attributes(given: list[str]) -> dict[str, str | float | bool]:
    found: dict[str, str | float | bool] = {}
    for one in given:
        key, equals, text = one.partition("=")
        if not key or not equals:
            raise OptionError(f"--attribute {one!r}: give KEY=VALUE")
        if key in ("path", "sha256"):
            raise OptionError(f"--attribute {key}: is set by this command; choose another name")
        found[key] = _value(text)
    return found


def _value(text: str) -> str | float | bool:
    """A number or a boolean where the text is one."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text) if text.strip("-").replace(".", "", 1).isdigit() else text
    except ValueError:
        return text


def _filter(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"--filter: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise OptionError('--filter: must be an object, such as {"type": "eq", "key": "year", "value": 2026}')
    return found


def _weights(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        vector, words = map(float, text.split(","))
    except ValueError:
        raise OptionError(f"--weights {text!r}: give two numbers, such as 1,0.5") from None
    return vector, words


def _plain(one: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(one)
