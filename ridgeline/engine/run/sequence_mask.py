"""fill_mask: the tokens that a sequence's grammar, thinking budget and parameters allow next.

Called by every sampler, as is `continues`, which advances a copy of a sequence over a guessed token.
"""

from __future__ import annotations

from ridgeline.engine.grammar.masks import Mask, NoToken, allow_only
from ridgeline.engine.schedule.request import Sequence

_NONE: frozenset[int] = frozenset()


def needs_mask(seq: Sequence) -> bool:
    """Whether not every token is allowed next."""
    return seq.matcher is not None or seq.forced_token is not None


def fill_mask(seq: Sequence, mask: Mask) -> None:
    """Raises NoToken if no token is allowed."""
    forced = seq.forced_token
    if forced is not None:
        allow_only(mask, forced)
        return
    assert seq.matcher is not None
    barred = seq.end_ids if seq.num_output < seq.params.min_tokens else _NONE
    reason = seq.matcher.fill(mask, barred, seq.params.ignore_eos)
    if reason is not None:
        raise NoToken(reason)


def continues(ahead: Sequence, token: int) -> bool:
    """Advance over a token that was drawn. False: the sequence ends there, by it or by an error of its
    grammar, which the scheduler finds in the same place."""
    if ahead.ends_with(token):
        return False
    if ahead.matcher is not None:
        try:
            if ahead.matcher.advance(token):
                return False
        except ValueError:
            return False
    if ahead.thinking is not None:
        ahead.thinking.advance(token)
    ahead.tokens.append(token)
    return True
