"""The tags of a model's thinking as the engine counts them: tokens to write, and how each token matches.

Called by the server for models with a reasoning format. Reads the whole vocabulary once per model and pair
of tags; the result is cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ridgeline.engine.schedule.thinking import NO_TAG, Tag, ThinkingTags

if TYPE_CHECKING:
    from ridgeline.models.text.tokenizer import Tokenizer


@functools.lru_cache(maxsize=64)
def thinking_tags(tokenizer: Tokenizer, opener: str, closer: str, leads: bool) -> ThinkingTags:
    """leads: the opener is a tag only at the start of an answer, after white space."""
    move_of_opener = _move_at_start if leads else _move_anywhere
    return ThinkingTags(
        _tag(tokenizer, opener, move_of_opener), _tag(tokenizer, closer, _move_anywhere), leads
    )


def _tag(tokenizer: Tokenizer, text: str, move: Callable[[bytes, int, bytes], int]) -> Tag:
    tag = text.encode()
    at_start = move is _move_at_start
    # A quick test first, as nearly no token passes it.
    first, within = tag[:1], {tag[i:j] for i in range(len(tag)) for j in range(i + 1, len(tag) + 1)}
    endings = tuple(tag[i:] for i in range(1, len(tag)))
    moves: dict[int, tuple[int, ...]] = {}
    for token in range(tokenizer.vocab_size):
        spelled = tokenizer.token_bytes(token)
        if (
            first in spelled
            or spelled in within
            or spelled.startswith(endings)
            or (at_start and spelled.isspace())
        ):
            found = tuple(move(tag, matched, spelled) for matched in range(len(tag)))
            if any(after > 0 for after in found) or (at_start and found[0] == 0):
                moves[token] = found
    return Tag(tuple(tokenizer.encode(text, add_special=False)), moves, _fewest(moves, len(tag)))


def _fewest(moves: dict[int, tuple[int, ...]], length: int) -> tuple[int, ...]:
    """For each number of bytes matched, the fewest tokens that complete the tag."""
    counts = [length] * length + [0]
    for _ in range(length):
        for found in moves.values():
            for matched, after in enumerate(found):
                if after != NO_TAG:
                    counts[matched] = min(counts[matched], 1 + counts[after])
    return tuple(counts[:length])


def _move_anywhere(tag: bytes, matched: int, token: bytes) -> int:
    """Bytes of the tag that a text ends with, after `matched` of them and this token; all, if it holds it."""
    text = tag[:matched] + token
    if tag in text:
        return len(tag)
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def _move_at_start(tag: bytes, matched: int, token: bytes) -> int:
    """The same at the start of an answer, where white space comes before the tag and nothing else."""
    text = tag[:matched] + token if matched else token.lstrip()
    if text.startswith(tag):
        return len(tag)
    return len(text) if tag.startswith(text) else NO_TAG
