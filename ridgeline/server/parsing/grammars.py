"""Grammars of calls and reasoning. (First form; to be completed.)"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.server.parsing.reasoning import ReasoningFormat


class UnsupportedSchema(Exception):
    def __init__(self, tool_name: str, message: str) -> None:
        super().__init__(message)
        self.tool_name = tool_name


def reasoning_grammar(
    reasoning: ReasoningFormat, inside: bool, budget: int | None, rest: str | None, special: Mapping[str, int]
) -> str:
    raise NotImplementedError
