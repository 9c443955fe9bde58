"""`ridgeline run`: one prompt, one answer on stdout and nothing else there, so that it pipes well."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TextIO

from ridgeline.cli.answers import Answers, AnswerStats, Message, Piece
from ridgeline.cli.parsing import DEFAULT_MODEL, MODEL_HELP, Verbs, add_verb
from ridgeline.cli.sampling import Sampling
from ridgeline.cli.source import add_source_flags, open_answers
from ridgeline.models.errors import ModelNotFound, TemplateError
from ridgeline.models.files.registry import names_model
from ridgeline.options import OptionError, add_flags, build, given_flags

DESCRIPTION = """\
Answer one prompt. The answer goes to stdout as it is generated, everything else to stderr.
MODEL may come first; with --model, every argument is the prompt. '-' stands for what comes in through a pipe;
without any PROMPT, the pipe is the prompt."""

EXAMPLES = """\
  ridgeline run "Name three rivers"
  ridgeline run gemma3-270m --raw "Three rivers are"
  ridgeline run "Summarize this text:" - < article.txt
  git log --oneline | ridgeline run --temperature 0 "Describe these changes:" -
  ridgeline run --raw --max-tokens 20 "Once upon a time"
  ridgeline run --json "Name a color" | jq -r .text
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "run", "answer one prompt; pipes well", DESCRIPTION, EXAMPLES)
    parser.usage = "ridgeline run [flags] [MODEL] [PROMPT ...]"
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="the prompt's parts; '-' is stdin. A first part written like a model's name is the model",
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    parser.add_argument("-s", "--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the text; no chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object when done, not the text")
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        help="figures on stderr after the answer (default: if stderr is a terminal)",
    )
    add_flags(parser, "sampling", Sampling, title="sampling")
    add_source_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sampling = build(Sampling, given_flags(args, "sampling"))
    sampling.check()
    if args.raw and args.system:
        raise OptionError("--system needs the chat template, which --raw leaves out")
    named = "" if args.model else take_model(args.prompt)
    args.model = args.model or named or None
    prompt = read_prompt(args.prompt, sys.stdin, named)
    try:
        answers = open_answers(args)
    except ModelNotFound as error:
        hint = f". If {named!r} belongs to the prompt, name the model with --model" if named else ""
        raise ModelNotFound(f"{error}{hint}") from error
    try:
        pieces = ask(answers, prompt, args, sampling)
    except TemplateError as error:
        raise TemplateError(f"{error}. `ridgeline run --raw` continues plain text") from error
    if args.json:
        text, stats = collect(pieces)
        result = {"model": answers.model, "text": text, "finish_reason": stats.finish_reason}
        print(json.dumps({**result, "stats": stats.as_dict()}, ensure_ascii=False))
    else:
        stats = write_answer(pieces, sys.stdout)
    show_stats = sys.stderr.isatty() if args.stats is None else args.stats
    if show_stats:
        print(stats.line(), file=sys.stderr)
    return 0


def ask(answers: Answers, prompt: str, args: argparse.Namespace, sampling: Sampling) -> Iterator[Piece]:
    if args.raw:
        return answers.complete(prompt, sampling)
    return answers.chat(conversation(prompt, args.system), sampling)


def take_model(parts: list[str]) -> str:
    """Remove the first part and return it if it names a model; else an empty text."""
    return parts.pop(0) if parts and names_model(parts[0], is_alone=len(parts) == 1) else ""


def read_prompt(parts: list[str], stdin: TextIO, model: str = "") -> str:
    """The parts joined by line ends, '-' replaced by stdin."""
    if not parts:
        if stdin.isatty() and model:
            raise OptionError(
                f'no prompt for the model {model}: ridgeline run {model} "Name a river", or pipe one in; '
                f"`ridgeline chat {model}` begins a conversation"
            )
        if stdin.isatty():
            raise OptionError('no prompt: ridgeline run "Name three rivers", or pipe one in')
        parts = ["-"]
    if parts.count("-") > 1:
        raise OptionError("'-' can stand for stdin only once")
    # The line end that `echo` adds is not meant; a model would go on after it.
    prompt = "\n".join(stdin.read().removesuffix("\n") if part == "-" else part for part in parts)
    if not prompt.strip():
        raise OptionError("the prompt is empty")
    return prompt


def conversation(prompt: str, system: str | None) -> list[Message]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": prompt}]


def collect(pieces: Iterator[Piece]) -> tuple[str, AnswerStats]:
    text, stats = "", None
    for piece in pieces:
        text += piece.text
        stats = piece.stats or stats
    assert stats is not None, "an answer's last piece has its figures"
    return text, stats


def write_answer(pieces: Iterator[Piece], out: TextIO) -> AnswerStats:
    """Write the pieces as they come, and a line end after the last if the text has none."""
    stats, ends_line = None, False
    for piece in pieces:
        if piece.text:
            out.write(piece.text)
            out.flush()
            ends_line = piece.text.endswith("\n")
        stats = piece.stats or stats
    if not ends_line:
        out.write("\n")
        out.flush()
    assert stats is not None, "an answer's last piece has its figures"
    return stats
