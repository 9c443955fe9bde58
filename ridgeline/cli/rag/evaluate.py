"""`ridgeline rag eval` and `ridgeline evaluate retrieval`: search and answers, by the user's questions."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ridgeline.cli.parsing import path_argument
from ridgeline.cli.rag.progress import counted
from ridgeline.cli.rag.server import add_server, client_of, store_of, told


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """The flags of `rag eval` and `evaluate retrieval`."""
    parser.add_argument(
        "questions", metavar="QUESTIONS", type=path_argument, help="questions, one a line (JSON lines)"
    )
    add_server(parser)
    parser.add_argument("--ranker", metavar="NAME", help="also measure hybrid search with this ranker")
    parser.add_argument(
        "--answers", action="store_true", help="also answer each question, and measure the answers"
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help="the chat model (default: the server's first)")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens of an answer (256)"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=path_argument, help="write each question's results here"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_eval(args: argparse.Namespace) -> int:
    from ridgeline.lab.evaluate.retrieval import evaluate_retrieval, judged_questions, report_text

    questions = judged_questions(args.questions)
    client = client_of(args)
    with told(args.url):
        store = store_of(client, args.store)
        with counted(sys.stderr, "questions", 0) as report:
            found = evaluate_retrieval(
                client,
                store["id"],
                questions,
                ranker=args.ranker,
                answers=args.answers,
                model=args.model,
                max_tokens=args.max_tokens,
                report=lambda what, done, total: report(done, what, total),
            )
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in found.rows), encoding="utf-8")
    if args.json:
        plain = asdict(found)
        del plain["rows"]
        print(json.dumps(plain, indent=2))
    else:
        print(report_text(found))
    return 0
