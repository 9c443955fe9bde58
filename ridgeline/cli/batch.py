"""`ridgeline batch`: answers every line of a file into another file; resumes after a stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from ridgeline.cli.parsing import DEFAULT_MODEL, MODEL_HELP, Verbs, add_verb, engine_config, path_argument
from ridgeline.cli.progress import fetch
from ridgeline.cli.source import API_KEY_VARIABLE, add_source_flags
from ridgeline.options import OptionError, given_flags

if TYPE_CHECKING:
    from ridgeline.engine.config import EngineConfig
    from ridgeline.server.batches.answering import Post
    from ridgeline.server.batches.offline import Figures

LINE_EVERY_S = 5.0
REMOTE_IN_FLIGHT = 32

DESCRIPTION = """\
Answer every line of IN and append the answers to OUT. A line has the form of /v1/batches:
{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}; or is only a body, with
"messages" or "prompt". Answers are in the order in which they are ready, each with its custom_id.
Lines with an answer in OUT are skipped: after a stop, the same command continues."""

EXAMPLES = """\
  ridgeline batch questions.jsonl answers.jsonl
  ridgeline batch questions.jsonl answers.jsonl --model ./my-model --kv-tokens 65536
  ridgeline batch questions.jsonl answers.jsonl --url http://127.0.0.1:8000
  echo '{"prompt": "The capital of France is", "max_tokens": 8}' > questions.jsonl
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "batch", "answer a file of requests", DESCRIPTION, EXAMPLES)
    parser.add_argument("input", metavar="IN", type=path_argument, help="requests, one a line (JSON lines)")
    parser.add_argument("output", metavar="OUT", type=path_argument, help="answers, one a line; appended to")
    parser.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: {DEFAULT_MODEL}); replaces every line's model",
    )
    parser.add_argument(
        "--in-flight",
        metavar="N",
        type=int,
        help="concurrent requests (default: twice the engine's running requests)",
    )
    add_source_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.in_flight is not None and args.in_flight < 1:
        raise OptionError(f"--in-flight must be at least 1, got {args.in_flight}")
    if args.url and given_flags(args, "engine"):
        flag = "--" + next(iter(given_flags(args, "engine"))).replace("_", "-")
        raise OptionError(f"{flag} is a setting of the engine; it does not apply with --url")
    from ridgeline.server.batches.offline import BadInput

    try:
        return asyncio.run(_run(args))
    except BadInput as error:
        raise OptionError(str(error)) from None
    except OSError as error:
        raise OptionError(f"{error.filename or args.output}: {error.strerror or error}") from error


async def _run(args: argparse.Namespace) -> int:
    from ridgeline.server.batches.answering import LineSender
    from ridgeline.server.batches.offline import OfflineBatch, OutputFile, check_lines, prepared_lines

    wanted = check_lines(args.input)
    output = OutputFile(args.output)
    left = len(wanted - output.answered)
    if left < len(wanted):
        print(f"{len(wanted) - left} of {len(wanted)} lines are already answered", file=sys.stderr)
    try:
        if not left:
            return 0
        async with _source(args) as (post, in_flight, limits):
            with _progress(sys.stderr, left) as report:
                batch = OfflineBatch(LineSender(post), output, args.in_flight or in_flight, report)
                started = time.monotonic()
                figures = await batch.run(prepared_lines(args.input, _change(args)))
            print(summary(figures, time.monotonic() - started, limits), file=sys.stderr)
    finally:
        output.close()
    return 1 if figures.failed else 0


def _change(args: argparse.Namespace) -> Callable[[dict[str, Any]], None] | None:
    """Changes to every body: --model replaces its model, and --url adds the priority of batches."""
    from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY

    if not args.url and not args.model:
        return None

    def change(fields: dict[str, Any]) -> None:
        if args.model:
            fields.pop("model", None)
        if args.url:
            if args.model:
                fields["model"] = args.model
            if "messages" in fields or "prompt" in fields:
                fields.setdefault("priority", BACKGROUND_PRIORITY)

    return change


# ── answering ────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def _source(args: argparse.Namespace) -> AsyncIterator[tuple[Post, int, dict[str, float]]]:
    """How to send a line, how many at once, and the machine's limits if known."""
    if args.url:
        from ridgeline.cli.remote_post import RemotePost

        key = args.api_key or os.environ.get(API_KEY_VARIABLE, "")
        yield RemotePost(args.url, key), REMOTE_IN_FLIGHT, {}
        return
    config = engine_config(args)
    fetch(config.model, sys.stderr)
    async with _engine(config) as answering:
        yield answering


@contextlib.asynccontextmanager
async def _engine(config: EngineConfig) -> AsyncIterator[tuple[Post, int, dict[str, float]]]:
    """A server's HTTP app over an engine of this process, without sockets."""
    from functools import partial

    from ridgeline.models.files.pull import ensure
    from ridgeline.server.app import app_over
    from ridgeline.server.batches.inner import post
    from ridgeline.server.config import ServerConfig
    from ridgeline.server.process.setup import public_name
    from ridgeline.server.process.supervisor import Supervisor
    from ridgeline.server.served_models import Model, ServedModels
    from ridgeline.telemetry import logs
    from ridgeline.telemetry.metrics import ServerMetrics

    server = ServerConfig(log_level="warning")
    logs.setup(server.log_level, server.log_format)
    supervisor = Supervisor(config, ensure(config.model).path, server)
    try:
        await supervisor.begin()
        await supervisor.start()
        assert supervisor.client is not None
        name = public_name(config.model)
        app = app_over(ServedModels(server, [Model((name,), supervisor, ServerMetrics(name))]))
        hello = supervisor.client.hello
        yield partial(post, app, None), 2 * hello.max_running, hello.limits
    finally:
        await supervisor.stop()


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────


def summary(figures: Figures, seconds: float, limits: dict[str, float]) -> str:
    """Figures beside the limit: computed tokens against the machine's matrix rate."""
    lines = figures.answered + figures.failed
    computed = figures.prompt_tokens - figures.cached_tokens + figures.output_tokens
    rate = computed / seconds if seconds else 0.0
    limit = limits.get("prefill_tokens_per_s")
    share = f" ({100 * rate / limit:.0f}% of this machine's limit, {limit:.0f})" if limit else ""
    parts = [
        f"{lines} lines in {seconds:.1f} s ({lines / seconds if seconds else 0:.1f}/s)",
        f"{figures.failed} failed" if figures.failed else "",
        f"{figures.output_tokens} tokens, prompts {figures.prompt_tokens} ({figures.cached_tokens} cached)",
        f"{rate:.0f} tok/s computed{share}",
    ]
    return " · ".join(part for part in parts if part)


@contextlib.contextmanager
def _progress(stream: TextIO, total: int) -> Iterator[Callable[[Figures], None]]:
    """A bar on a terminal, a line every few seconds anywhere else."""
    if not stream.isatty():
        yield _line_report(stream, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream)) as progress:
        task, begun = progress.add_task("", total=total), time.monotonic()

        def report(figures: Figures) -> None:
            rate = figures.output_tokens / max(time.monotonic() - begun, 1e-9)
            done = figures.answered + figures.failed
            progress.update(task, completed=done, description=f"{rate:.0f} tok/s")

        yield report


def _line_report(
    stream: TextIO, total: int, clock: Callable[[], float] = time.monotonic
) -> Callable[[Figures], None]:
    next_at = clock() + LINE_EVERY_S

    def report(figures: Figures) -> None:
        nonlocal next_at
        if clock() >= next_at:
            next_at = clock() + LINE_EVERY_S
            done = figures.answered + figures.failed
            print(f"{done} of {total} lines", file=stream, flush=True)

    return report
