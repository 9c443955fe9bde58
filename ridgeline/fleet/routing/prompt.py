"""PromptView: what the router knows of a request when it chooses a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.replica.prompt_blocks import MAX_BLOCKS

TOKENS_PER_BLOCK = 64.0  # of English, see replica.prompt_blocks


@dataclass(frozen=True, slots=True)
class PromptView:
    """`tokens` and `output_tokens` are estimates; an output_tokens of 0 means the model's mean."""

    model: str  # a name, an alias or an adapter of the table
    blocks: Sequence[int] = ()  # replica.prompt_blocks
    tokens: int = 0
    output_tokens: int = 0
    adapter: str = ""
    session: str = ""
    tenant: str = ""
    priority: int = 1  # 0 goes first
    region: str = ""  # where the client is; a replica there is preferred
    allowed_regions: Sequence[str] = ()  # residency: no replica outside them; empty: all

    @property
    def tokens_per_block(self) -> float:
        if not self.blocks:
            return 0.0
        mean = self.tokens / len(self.blocks)
        # A longer prompt than MAX_BLOCKS is named by its beginning alone.
        return mean if len(self.blocks) < MAX_BLOCKS else min(mean, TOKENS_PER_BLOCK)

    def uncached_tokens(self, matched_blocks: int) -> float:
        return max(self.tokens - matched_blocks * self.tokens_per_block, 1.0)
