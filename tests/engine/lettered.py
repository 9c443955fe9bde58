"""A vocabulary of single letters, A for token 0, for tests of thinking tags on made-up tokens."""

from __future__ import annotations

from ridgeline.engine.client.thinking_tags import thinking_tags
from ridgeline.engine.schedule.thinking import ThinkingBudget, ThinkingTags


class Letters:
    vocab_size = 26

    def token_bytes(self, token: int) -> bytes:
        return bytes([65 + token]) if token < 26 else b""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [byte - 65 for byte in text.encode()]


LETTERS = Letters()


def lettered_tags(opener: str = "B", closer: str = "CD", leads: bool = True) -> ThinkingTags:
    return thinking_tags(LETTERS, opener, closer, leads)  # type: ignore[arg-type]


def budget(
    tokens: int, *, opener: str = "B", closer: str = "CD", leads: bool = True, inside: bool = True
) -> ThinkingBudget:
    return ThinkingBudget(tokens, lettered_tags(opener, closer, leads), inside)
