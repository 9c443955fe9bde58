"""Thinking: counts the tokens of an answer's thinking section and says when its closing tag must be written.

Pure data. A request carries a `ThinkingBudget`; each of its sequences has a `ThinkingCount`, advanced with
its tokens, and the samplers ask it for the forced token. The server counts usage with the same class, so
both agree on every token. Tags are recognized by their bytes, however the model divides them into tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.engine.errors import InvalidRequest

NO_TAG = -1  # a move of an opening tag: the answer begins with something else


@dataclass(frozen=True, slots=True)
class Tag:
    """A marker of the model's text.

    ids:   its usual tokens, written when it is forced
    moves: token → for each number of bytes matched before it, the number matched after it; the length of
           these lists is the length of the tag, so that value means the tag is complete. A token that is not
           here matches nothing.
    fewest: for each number of bytes matched, the fewest tokens that complete the tag
    """

    ids: tuple[int, ...]
    moves: dict[int, tuple[int, ...]]
    fewest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The tags around a model's thinking.

    leads: the opening tag is one only at the start of an answer, and there is one section. Otherwise there
    may be several sections, anywhere.
    """

    opener: Tag
    closer: Tag
    leads: bool


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most this many tokens of thinking in an answer, in all its sections together.

    inside: the prompt ends inside a thinking section
    """

    tokens: int
    tags: ThinkingTags
    inside: bool

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise InvalidRequest("thinking", f"a budget must not be negative, got {self.tokens}")
        if not self.tags.closer.ids:
            raise InvalidRequest("thinking", "the closing tag has no tokens")


class ThinkingCount:
    """Where one answer is relative to its thinking. A token that holds part of a tag is not counted."""

    __slots__ = ("_budget", "_closing", "_inside", "_matched", "_over", "_spelled", "_tags", "_tokens")

    def __init__(self, tags: ThinkingTags, inside: bool, budget: int | None = None) -> None:
        """budget: None counts without a limit."""
        self._tags = tags
        self._inside = inside
        self._over = False  # no further section can begin
        self._budget = budget
        self._tokens = 0  # in thinking sections, those that may be part of a closing tag included
        self._matched = 0  # bytes of the tag that is awaited
        self._closing = 0  # the last tokens that may be part of a closing tag
        self._spelled = 0  # tokens of `closer.ids` that were just written

    @classmethod
    def of(cls, budget: ThinkingBudget) -> ThinkingCount:
        return cls(budget.tags, budget.inside, budget.tokens)

    @property
    def inside(self) -> bool:
        return self._inside

    @property
    def tokens(self) -> int:
        """Tokens of thinking so far, without those that may be the start of the closing tag."""
        return self._tokens - self._closing

    def tokens_at_end(self) -> int:
        """Tokens of thinking if the answer ends here: the start of a closing tag is then thinking."""
        return self._tokens

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: any."""
        if not self._inside or self._budget is None or self._tokens < self._budget:
            return None
        return self._tags.closer.ids[self._spelled]

    def may_force(self, pending: int) -> bool:
        """Whether a token is forced after `pending` tokens that are not known yet, whatever they are."""
        if self._budget is None or self._over:
            return False
        # Unknown tokens may complete the opening tag, and the others then count.
        unknown = pending if self._inside else pending - self._tags.opener.fewest[self._matched]
        return unknown >= 0 and self._tokens + unknown >= self._budget

    def advance(self, token: int) -> None:
        """The token was chosen."""
        if self._inside:
            self._think(token)
        elif not self._over:
            self._open(token)

    def _open(self, token: int) -> None:
        moves = self._tags.opener.moves.get(token)
        if moves is None:
            self._matched, self._over = 0, self._tags.leads
            return
        matched = moves[self._matched]
        self._inside = matched == len(moves)
        self._over = matched == NO_TAG
        self._matched = 0 if self._inside or self._over else matched

    def _think(self, token: int) -> None:
        self._tokens += 1
        closer = self._tags.closer
        self._spelled = _overlap(closer.ids, self._spelled, token)
        moves = closer.moves.get(token)
        matched = 0 if moves is None else moves[self._matched]
        if not matched:
            self._closing = 0
        elif self._matched and matched > self._matched:
            self._closing += 1
        else:  # the tag begins in this token
            self._closing = 1
        self._matched = matched
        if moves is not None and matched == len(moves):
            self._tokens -= self._closing
            self._inside, self._over = False, self._tags.leads
            self._matched = self._closing = self._spelled = 0


def _overlap(ids: tuple[int, ...], known: int, token: int) -> int:
    """How many of the first ids were just written: `known` of them before this token. Less than all."""
    if ids[known] == token and known + 1 < len(ids):
        return known + 1
    written = (*ids[:known], token)
    return next((size for size in range(known, 0, -1) if written[-size:] == ids[:size]), 0)
