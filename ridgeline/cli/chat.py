"""`ridgeline chat`: a conversation in the terminal, with the figures of each answer below it."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

from ridgeline.cli.answers import Answers, AnswerStats, Message
from ridgeline.cli.errors import RemoteError
from ridgeline.cli.parsing import DEFAULT_MODEL, MODEL_HELP, Verbs, add_verb
from ridgeline.cli.sampling import Sampling
from ridgeline.cli.source import add_source_flags, open_answers
from ridgeline.engine.errors import EngineError
from ridgeline.models.errors import TemplateError
from ridgeline.options import add_flags, build, given_flags

DESCRIPTION = """\
Talk to a model. Each answer is streamed, and followed by its time to first token, its speed, and how
much of the conversation was still in the prefix cache. Ctrl-C stops the answer, Ctrl-D or /exit leaves."""

EXAMPLES = """\
  ridgeline chat
  ridgeline chat smollm2-135m --system "You answer in one sentence." --temperature 0
  ridgeline chat --url http://127.0.0.1:8000
"""

COMMANDS = """\
/help           this list
/reset          forget the conversation (the system message stays)
/system TEXT    forget the conversation and begin with this system message
/exit           leave; so does Ctrl-D
Ctrl-C          stop the answer"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "chat", "talk to a model in the terminal", DESCRIPTION, EXAMPLES)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    parser.add_argument("-m", "--model", dest="named", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("-s", "--system", metavar="TEXT", default="", help="system message")
    add_flags(parser, "sampling", Sampling, title="sampling")
    add_source_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sampling = build(Sampling, given_flags(args, "sampling"))
    sampling.check()
    args.model = args.model or args.named
    answers = open_answers(args)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and line history in input()
    if sys.stdin.isatty():
        print(f"{answers.model} · /help for commands, Ctrl-D to leave")
    Chat(answers, sampling, args.system, sys.stdout).loop(typed_lines(sys.stdin))
    return 0


def typed_lines(stdin: TextIO) -> Iterator[str]:
    """Lines until the end of input. Ctrl-C at the prompt clears the line and asks again."""
    prompt = "\n> " if stdin.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if prompt:
                print()  # start the shell's prompt on a new line
            return
        except KeyboardInterrupt:
            print("  (Ctrl-D leaves)", end="")


class Chat:
    """The conversation so far, and what a typed line does to it."""

    def __init__(self, answers: Answers, sampling: Sampling, system: str, out: TextIO) -> None:
        self.messages: list[Message] = []
        self._answers = answers
        self._sampling = sampling
        self._system = system
        self._out = out
        self._begin_afresh()

    def loop(self, lines: Iterator[str]) -> None:
        for line in lines:
            if not self.take(line.strip()):
                return

    def take(self, line: str) -> bool:
        """Act on one line; False when it was the last."""
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/help":
            self._say(COMMANDS)
        elif command in ("/reset", "/system"):
            self._system = rest.strip() if command == "/system" else self._system
            self._begin_afresh()
            self._say("(a new conversation)")
        elif command.startswith("/") and command[1:].isalpha():
            self._say(f"unknown command {command}; /help lists them")
        elif line:
            self._ask(line)
        return True

    def _begin_afresh(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def _ask(self, question: str) -> None:
        asked = [*self.messages, {"role": "user", "content": question}]
        try:
            text, stats = self._stream(asked)
        except (EngineError, TemplateError, RemoteError) as error:
            self._say(
                f"error: {error}"
            )  # too long, for example: /reset helps, exiting would lose the conversation
            return
        self.messages = [*asked, {"role": "assistant", "content": text}]
        self._say(self._dim(f"[{stats.line()}]" if stats else "[stopped]"))

    def _stream(self, messages: list[Message]) -> tuple[str, AnswerStats | None]:
        """Print the answer as it arrives. No figures: it was stopped."""
        text, stats = "", None
        pieces = self._answers.chat(messages, self._sampling)
        with contextlib.closing(pieces), deferred_interrupt() as interrupted:  # type: ignore[type-var]
            for piece in pieces:
                text += piece.text
                self._out.write(piece.text)
                self._out.flush()
                stats = piece.stats or stats
                if interrupted():
                    break
        self._out.write("\n")
        return text, stats

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._out.isatty() else text


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that is read between pieces: raised inside a step, it would leave it half done.

    A second Ctrl-C raises at once.
    """
    noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
