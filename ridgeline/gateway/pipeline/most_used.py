"""most_used: the most tokens that a request may use, which its limits reserve before it is sent.

An upper estimate from the body alone. It serves single requests and the lines of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ridgeline.gateway.body import Fields, field
from ridgeline.gateway.errors import BadRequest

GENERATING = frozenset({"chat", "completions", "responses", "messages"})
OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
ANSWERS = ("n", "best_of")
SEVERAL_ANSWERS = frozenset({"chat", "completions"})  # kinds with several answers per request
BYTES_PER_TOKEN = 4
MOST_ANSWERS = 1024
FILE_SEARCH_TOKENS = 4096  # of passages that our server adds to a prompt by default, and of its own prompt
LONGEST_OUTPUT = 10_000_000  # tokens; a larger limit is a mistake
NULL = msgspec.Raw(b"null")


PromptCounts = tuple[int, int]


class MostUsed(NamedTuple):
    """Tokens that a request may read and write."""

    tokens_in: int
    tokens_out: int


def most_used(
    kind: str, fields: Fields, body_bytes: int, output_estimate: int, counts: PromptCounts | None = None
) -> MostUsed:
    """`output_estimate`: tokens of one answer without a limit in the request. BadRequest names a bad field.

    counts: of a large request, counted by another process.
    """
    prompts, written_out = counts or prompt_counts(kind, fields)
    tokens_in = max(body_bytes // BYTES_PER_TOKEN, written_out)
    if kind not in GENERATING:
        return MostUsed(tokens_in, 0)
    if kind == "responses" and b'"file_search"' in bytes(fields.get("tools", NULL)):
        tokens_in += FILE_SEARCH_TOKENS
    answers, limits = 1, []
    for name in fields:
        if name in OUTPUT_LIMITS and fields[name] != NULL:
            limits.append(_output_limit(fields, name))
        elif kind in SEVERAL_ANSWERS and name in ANSWERS:
            answers = max(answers, _answers(fields, name))
    return MostUsed(tokens_in, max(limits, default=output_estimate) * answers * prompts)


def prompt_counts(kind: str, fields: Fields) -> PromptCounts:
    """The number of prompts in a request, and the number of token ids in them."""
    if kind not in ("completions", "embeddings"):
        return 1, 0
    return _prompts(fields.get("prompt" if kind == "completions" else "input"))


def _answers(fields: Fields, name: str) -> int:
    asked = field(fields, name, int, 1)
    if not 1 <= asked <= MOST_ANSWERS:
        raise BadRequest(f"{name}: must be 1 to {MOST_ANSWERS}", param=name)
    return asked


def _output_limit(fields: Fields, name: str) -> int:
    asked = field(fields, name, int, 0)
    if not 0 <= asked <= LONGEST_OUTPUT:
        raise BadRequest(f"{name}: {asked} is out of range", param=name)
    return asked


_items = msgspec.json.Decoder(list[msgspec.Raw])


def _prompts(value: msgspec.Raw | None) -> tuple[int, int]:
    """The number of prompts in a `prompt` or `input`, and the number of token ids in it."""
    text = bytes(value).lstrip() if value is not None else b""
    if not text.startswith(b"["):
        return 1, 0
    first = text[1:64].lstrip()[:1]
    if first.isdigit():  # one prompt, as token ids
        return 1, text.count(b",") + 1
    try:
        prompts = len(_items.decode(text))
    except msgspec.DecodeError:
        return 1, 0  # the upstream refuses it
    return max(prompts, 1), text.count(b",") + 1 if first == b"[" else 0
