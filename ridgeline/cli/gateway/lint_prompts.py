"""`ridgeline lint-prompts`: how much of a file's prompts a prefix cache can share, and what breaks it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.parsing import Verbs, add_verb

if TYPE_CHECKING:
    from ridgeline.web.prompt_files import Prompt
    from ridgeline.web.prompt_lint import Report, TemplateReport

DESCRIPTION = """\
Report how much of each prompt a prefix cache could reuse from earlier ones, in blocks of 16 tokens, where
otherwise equal prompts first differ, and how much would be shared if the difference came last. Reads JSONL of
chat, completions, responses or messages requests (or of a batch), and text templates."""

EXAMPLES = """\
  ridgeline lint-prompts requests.jsonl
  ridgeline lint-prompts requests.jsonl --url http://127.0.0.1:8000
  ridgeline lint-prompts prompts/ --fail-under 80
"""

TIMEOUT_S = 30.0
MOST_BREAKERS = 12  # shown; --json has all


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "lint-prompts", "find out why prompts do not share a prefix", DESCRIPTION, EXAMPLES
    )
    parser.add_argument(
        "path", nargs="+", type=Path, metavar="FILE", help="JSONL of requests, a template, or a folder"
    )
    parser.add_argument("--url", metavar="URL", help="count tokens with this server's /tokenize")
    parser.add_argument("--model", metavar="NAME", help="model at that server; default: its first")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="count tokens with this tokenizer.json"
    )
    parser.add_argument(
        "--fail-under", type=float, metavar="PERCENT", help="exit with code 1 if a smaller share is shareable"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ridgeline.web.prompt_files import files_in, is_requests, read_requests, read_template
    from ridgeline.web.prompt_lint import lint, lint_template

    files = files_in(args.path)
    prompts = [prompt for path in files if is_requests(path) for prompt in read_requests(path)]
    if args.url and _system_stands_first(args.url, args.model, prompts):
        prompts = [prompt.with_system_first() for prompt in prompts]
    report = lint(_shown(prompts), _encoder(args)) if prompts else None
    templates = [lint_template(read_template(path)) for path in files if not is_requests(path)]
    share = _share(report, templates)
    if args.json:
        print(json.dumps(_as_json(report, templates, share), indent=2))
    else:
        _print(report, templates)
    if args.fail_under is not None and 100 * share < args.fail_under:
        print(
            f"ridgeline: {100 * share:.1f} % is shareable, less than --fail-under {args.fail_under:g}",
            file=sys.stderr,
        )
        return 1
    return 0


def _encoder(args: argparse.Namespace) -> Callable[[Prompt], Sequence[int]] | None:
    if args.url:
        return lambda prompt: _remote_tokens(args.url, args.model, prompt)
    if args.tokenizer:
        from tokenizers import Tokenizer

        from ridgeline.options import OptionError

        try:
            tokenizer = Tokenizer.from_file(str(args.tokenizer))
        except Exception as error:  # it raises a bare Exception for any error
            raise OptionError(f"--tokenizer {args.tokenizer}: {error}") from None
        return lambda prompt: tokenizer.encode(prompt.text, add_special_tokens=False).ids
    return None


def _remote_tokens(url: str, model: str | None, prompt: Prompt) -> list[int]:
    """A chat as the server's chat template renders it."""
    asked: dict[str, Any] = {"prompt": prompt.text}
    if isinstance(prompt.body.get("messages"), list):
        asked = {name: prompt.body[name] for name in ("messages", "tools") if prompt.body.get(name)}
    tokens: list[int] = _post(url, "/tokenize", model, asked, prompt.source)["tokens"]
    return tokens


def _system_stands_first(url: str, model: str | None, prompts: list[Prompt]) -> bool:
    """Whether the server's template puts the system prompt before the tools; tested with one request."""
    for prompt in prompts:
        system = next((piece.text for piece in prompt.pieces if piece.where == "system"), "")
        tools = prompt.body.get("tools")
        if system and tools and isinstance(prompt.body.get("messages"), list):
            asked = {"messages": prompt.body["messages"], "tools": tools}
            rendered = str(_post(url, "/apply_template", model, asked, prompt.source)["prompt"])
            name = str(tools[0].get("function", tools[0]).get("name", ""))
            return -1 < rendered.find(system.removeprefix("system: ").strip()[:40]) < rendered.find(name)
    return False


def _post(url: str, path: str, model: str | None, body: dict[str, Any], source: str) -> dict[str, Any]:
    from ridgeline.proxy.blocking_client import BlockingClient
    from ridgeline.proxy.errors import BrokenOff, Unreachable

    asked = json.dumps(body | ({"model": model} if model else {})).encode()
    try:
        answer = BlockingClient(url, timeout_s=TIMEOUT_S).ask("POST", path, asked)
        if answer.status != 200:
            hint = (
                "; a gateway does not have this path: give a server behind it" if answer.status == 404 else ""
            )
            raise RemoteError(f"{source}: {url} answers {path} with {answer.status}{hint}")
        found: dict[str, Any] = json.loads(answer.body)
    except (Unreachable, BrokenOff, ValueError) as error:
        raise RemoteError(f"{url} is unreachable: {error}; is `ridgeline serve` running there?") from error
    return found


def _shown(prompts: list[Prompt]) -> Iterable[Prompt]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(prompts, "reading", console=console, transient=True, disable=not console.is_terminal)


def _share(report: Report | None, templates: list[TemplateReport]) -> float:
    """Share of all tokens that were read."""
    tokens = (report.tokens if report else 0) + sum(each.tokens for each in templates)
    shared = (report.tokens_shared if report else 0) + sum(each.tokens_before for each in templates)
    return shared / tokens if tokens else 0.0


def _print(report: Report | None, templates: list[TemplateReport]) -> None:
    if report is not None:
        _print_requests(report)
    if report is not None and templates:
        print()
    if templates:
        print(f"{'TEMPLATE':<40} {'FIXED':>8} {'BEFORE':>8} {'SHARE':>7}  FIRST VARIABLE")
    for each in templates:
        first = f"{each.called} ({each.breaker})" if each.called else "none"
        source = each.source if len(each.source) <= 40 else "…" + each.source[-39:]
        print(f"{source:<40} {each.tokens:>8,} {each.tokens_before:>8,} {each.share:>7.1%}  {first}")


def _print_requests(report: Report) -> None:
    now, ideal = report.tokens_shared, report.tokens_shared_ideal
    measured = "" if report.measured_in == "tokens" else f" ({report.measured_in})"
    print(f"{report.requests:,} requests, {report.tokens:,} tokens{measured}")
    print(f"  shareable now               {report.share:6.1%}  {now:>12,} tokens")
    print(f"  with variable content last  {report.share_ideal:6.1%}  {ideal:>12,} tokens  (+{ideal - now:,})")
    if report.breakers:
        head = f"{'WHAT BREAKS IT':<15} {'WHERE':<20} {'AT TOKEN':>8} {'REQUESTS':>9} {'LOST':>12}"
        print(f"\n  {head}  EXAMPLE")
    for row in report.breakers[:MOST_BREAKERS]:
        place = f"{row.kind:<15} {row.where[:20]:<20} {row.at_token:>8,}"
        print(f"  {place} {row.requests:>9,} {row.tokens_lost:>12,}  {row.example}")
    if len(report.breakers) > MOST_BREAKERS:
        print(f"  … and {len(report.breakers) - MOST_BREAKERS} more: --json")


def _as_json(report: Report | None, templates: list[TemplateReport], share: float) -> dict[str, Any]:
    return {
        "share": share,
        "requests": None
        if report is None
        else {**asdict(report), "share": report.share, "share_ideal": report.share_ideal},
        "templates": [{**asdict(each), "share": each.share} for each in templates],
    }
