"""fill_mask: the tokens that a sequence's grammar, thinking budget and parameters allow next.

Called by every sampler.
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
