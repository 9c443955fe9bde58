"""Converts a body's texts or ids to token ids for the encoder, within its limits, or a 400 that names the
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.engine.client.client import AsyncClient
from ridgeline.models.text.tokenizer import CutText, Tokenizer
from ridgeline.server.answering.validation import check_token_ids
from ridgeline.server.errors import BadRequest
from ridgeline.server.vectors.protocol import MAX_TEXTS, EmbeddingRequest, VectorRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """The maximum length of a text, and whether longer ones are truncated to it."""

    most: int
    cuts: bool

    @classmethod
    def of(cls, body: VectorRequest, client: AsyncClient, cuts: bool = False) -> Lengths:
        longest, asked = client.hello.max_context, body.truncate_prompt_tokens
        if asked is None:
            return cls(longest, cuts)
        if asked != -1 and not 3 <= asked <= longest:
            field = "truncate_prompt_tokens"
            raise BadRequest(field, f"give 3 to {longest}, or -1 for this model's maximum; got {asked}")
        return cls(longest if asked == -1 else asked, True)


def embedding_texts(client: AsyncClient, body: EmbeddingRequest) -> list[list[int]]:
    """One list of ids for a text or for ids, several for a list of either."""
    lengths = Lengths.of(body, client, cuts=bool(body.truncate))
    given = body.input
    if isinstance(given, str):
        return encoded(client.tokenizer, [given], "input", lengths, single=True)
    if not given:
        raise BadRequest("input", "the list is empty")
    if all(isinstance(item, int) for item in given):
        return [_ids(client, given, "input", lengths)]
    if len(given) > MAX_TEXTS:
        raise BadRequest("input", f"{len(given)} texts; at most {MAX_TEXTS} in one request")
    if all(isinstance(item, str) for item in given):
        return encoded(client.tokenizer, [str(item) for item in given], "input", lengths)
    if all(isinstance(item, list) for item in given):
        return [_ids(client, item, f"input[{i}]", lengths) for i, item in enumerate(given)]
    raise BadRequest("input", "a list must hold only texts, only token ids, or only lists of token ids")


def encoded(
    tokenizer: Tokenizer, texts: Sequence[str], field: str, lengths: Lengths, *, single: bool = False
) -> list[list[int]]:
    """Texts with their special tokens, in the order given."""
    return [each.ids for each in _cut(tokenizer, texts, field, lengths, single)]


def cut_texts(
    tokenizer: Tokenizer, texts: Sequence[str], field: str, lengths: Lengths
) -> tuple[list[list[int]], set[int]]:
    """The same, and the indices of the truncated texts."""
    found = _cut(tokenizer, texts, field, lengths, False)
    return [each.ids for each in found], {i for i, each in enumerate(found) if each.tokens > lengths.most}


def _cut(
    tokenizer: Tokenizer, texts: Sequence[str], field: str, lengths: Lengths, single: bool
) -> list[CutText]:
    found = tokenizer.encode_cut(texts, lengths.most)
    for i, each in enumerate(found):
        place = field if single else f"{field}[{i}]"
        if not each.ids:
            raise BadRequest(place, "the text has no tokens")
        if each.tokens > lengths.most and not lengths.cuts:
            _refuse(place, each.tokens, lengths.most)
    return found


def _ids(client: AsyncClient, ids: Any, field: str, lengths: Lengths) -> list[int]:
    if not ids:
        raise BadRequest(field, "there are no token ids")
    check_token_ids(ids, field, client.hello.vocab_size)
    if len(ids) > lengths.most and not lengths.cuts:
        _refuse(field, len(ids), lengths.most)
    return list(ids[: lengths.most])


def _refuse(field: str, tokens: int, most: int) -> None:
    message = f"{tokens} tokens; this model takes {most}: shorten it, or set truncate_prompt_tokens"
    raise BadRequest(field, message, "context_length_exceeded")
