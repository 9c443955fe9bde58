"""`ridgeline explain`: a term or technique, the figure that matters, and the command that measures it."""

from __future__ import annotations

import argparse

from ridgeline.cli.parsing import Verbs, add_verb

DESCRIPTION = """\
Explain a term or a technique of serving: what it is, the formula or figure that matters, when it pays and
when it hurts, and the command that measures it. Without a term: the list of all."""

EXAMPLES = """\
  ridgeline explain
  ridgeline explain TTFT
  ridgeline explain speculative decoding
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "explain", "explain a term, with its figure", DESCRIPTION, EXAMPLES)
    parser.add_argument("term", nargs="*", metavar="TERM", help="a term or technique, in any spelling")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ridgeline.lab.knowledge.entries import find
    from ridgeline.lab.knowledge.pages import as_text, index_text

    print(as_text(find(" ".join(args.term))) if args.term else index_text())
    return 0
