"""How models mark their reasoning, and whether a rendered prompt has already opened it.

The parsers read these markers and the grammars write them; nothing here reads a model's output.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a reasoning block.

    `leads`: it can only stand at the start of an answer, and any call format may follow it. Otherwise it is
    part of one call format (its channels), which reads it itself.
    """

    name: str
    opener: str
    closer: str
    shows_special: bool
    leads: bool = True

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside a reasoning block; its last few dozen characters suffice."""
        return prompt.rstrip().endswith(self.opener.rstrip())


THINK = ReasoningFormat("think", "<think>", "</think>", shows_special=False)
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]", shows_special=True)
HARMONY_ANALYSIS = ReasoningFormat(
    "harmony", "<|channel|>analysis<|message|>", "<|end|>", shows_special=True, leads=False
)
GEMMA_THOUGHT = ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>", shows_special=True, leads=False)

REASONING_FORMATS = {f.name: f for f in (THINK, MISTRAL_THINK, HARMONY_ANALYSIS, GEMMA_THOUGHT)}
