"""PromptView: the facts about a request that the choice of a replica uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.fleet.placement.regions import Rules
from ridgeline.replica.prompt_blocks import MAX_BLOCKS

TOKENS_PER_BLOCK = 64.0  # in English text; see replica.prompt_blocks


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
    region: str = ""  # where the router is; a replica there is preferred, then the nearest
    residency: Rules = ()  # no replica outside the regions that every rule allows
    only: str = ""  # the one replica that can answer: it has what the request continues

    @property
    def tokens_per_block(self) -> float:
        if not self.blocks:
            return 0.0
        mean = self.tokens / len(self.blocks)
        # Only the first MAX_BLOCKS blocks of a longer prompt have names.
        return mean if len(self.blocks) < MAX_BLOCKS else min(mean, TOKENS_PER_BLOCK)

    def uncached_tokens(self, matched_blocks: int) -> float:
        return max(self.tokens - matched_blocks * self.tokens_per_block, 1.0)
