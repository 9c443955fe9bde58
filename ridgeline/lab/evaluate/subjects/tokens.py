"""A pair of texts as token ids, cut as lm-eval cuts it. Pure, given an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ridgeline.lab.errors import LabError
from ridgeline.lab.evaluate.scoring.likelihood import Pair

Encode = Callable[[str, bool], list[int]]  # (text, with the model's special tokens)


class TokenPair(NamedTuple):
    """ids: context and continuation. start: where the continuation begins; its first token has a context."""

    ids: list[int]
    start: int


def token_pair(pair: Pair, encode: Encode, prefix: int | None, longest: int) -> TokenPair:
    """The continuation is what context + continuation has beyond the context's own tokens.

    prefix: the token before a text without context (BOS, else EOS); None: the first token is not scored.
    longest: tokens that fit; earlier ones of the context are cut. LabError if the continuation does not fit.
    """
    if not pair.context:
        ids = encode(pair.continuation, False)
        ids = ids if prefix is None else [prefix, *ids]
        start = 1
    else:
        pair = pair.split_at_word()
        whole = encode(pair.context + pair.continuation, True)
        ids, start = whole, min(len(encode(pair.context, True)), len(whole) - 1)
        start = max(start, 1)
    cut = max(0, len(ids) - longest)
    if cut >= start:
        raise LabError(
            f"{pair.continuation[:40]!r}… has {len(ids) - start} tokens, and {longest - 1} fit into the "
            "context after one before them; divide the text, or raise the context"
        )
    return TokenPair(ids[cut:], start - cut)
