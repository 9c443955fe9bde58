"""Blocks: converts parsed events of an answer to Anthropic's content blocks: start, deltas, stop.

A whole answer is the folded steps of the streamed one, so the two cannot differ. Called by `shape`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Any, Literal, cast

import msgspec

from ridgeline.server.messages_api.bodies import (
    Block,
    BlockStep,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Delta,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from ridgeline.server.parsing.events import ParsedEvent
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning
from ridgeline.web.tool_input import ToolInput

TOOL_ID = "toolu_"  # prefix of the parser's id; removed when the client sends it back
ThinkingShown = Literal["yes", "omitted", "no"]


class Blocks:
    """The blocks of one answer. `thinking`: with text, as blocks without text, or not at all."""

    def __init__(self, thinking: ThinkingShown) -> None:
        self._thinking = thinking
        self._begun = 0
        self._open: type[ParsedEvent] | None = None  # the event type of the open block
        self._input = ToolInput()
        self._digest = hashlib.sha256()

    def add(self, events: Iterable[ParsedEvent]) -> list[BlockStep]:
        steps: list[BlockStep] = []
        for event in events:
            match event:
                case Content(text):
                    if text:
                        self._ensure(Content, TextBlock(""), steps)
                        steps.append(self._delta(TextDelta(text)))
                case Reasoning(text):
                    if text and self._thinking != "no":
                        self._reason(text, steps)
                case CallStart(id, name):
                    self._close(steps, cut=False)
                    self._begin(CallArguments, ToolUseBlock(TOOL_ID + id, name, {}), steps)
                case CallArguments(text):
                    self._grow_input(self._input.add(text), steps)
        return steps

    def end(self, cut: bool) -> list[BlockStep]:
        """The answer has ended. `cut`: early, by a limit or a stop sequence."""
        steps: list[BlockStep] = []
        self._close(steps, cut)
        return steps

    def _reason(self, text: str, steps: list[BlockStep]) -> None:
        self._ensure(Reasoning, ThinkingBlock("", ""), steps)
        self._digest.update(text.encode())
        if self._thinking == "yes":
            steps.append(self._delta(ThinkingDelta(text)))

    def _ensure(self, kind: type[ParsedEvent], block: Block, steps: list[BlockStep]) -> None:
        if self._open is not kind:
            self._close(steps, cut=False)
            self._begin(kind, block, steps)

    def _begin(self, kind: type[ParsedEvent], block: Block, steps: list[BlockStep]) -> None:
        steps.append(ContentBlockStart(self._begun, block))
        self._begun += 1
        self._open = kind

    def _close(self, steps: list[BlockStep], cut: bool) -> None:
        if self._open is None:
            return
        if self._open is Reasoning:
            steps.append(self._delta(SignatureDelta(self._signature())))
        elif self._open is CallArguments:
            self._grow_input(self._input.end(cut), steps)
            self._input = ToolInput()
        steps.append(ContentBlockStop(self._begun - 1))
        self._open = None

    def _grow_input(self, text: str, steps: list[BlockStep]) -> None:
        if text:
            steps.append(self._delta(InputJsonDelta(text)))

    def _delta(self, delta: Delta) -> ContentBlockDelta:
        return ContentBlockDelta(self._begun - 1, delta)

    def _signature(self) -> str:
        """Equal for equal thinking. It is not checked: clients need a value to send back."""
        digest, self._digest = self._digest, hashlib.sha256()
        return base64.b64encode(digest.digest()).decode()


def folded(steps: Iterable[BlockStep]) -> list[Block]:
    """The blocks that the steps add up to."""
    blocks: list[Block] = []
    pieces: list[str] = []
    signature = ""
    for step in steps:
        if isinstance(step, ContentBlockStart):
            blocks.append(step.content_block)
            pieces, signature = [], ""
        elif isinstance(step, ContentBlockStop):
            blocks[-1] = _filled(blocks[-1], "".join(pieces), signature)
        else:
            match step.delta:
                case TextDelta(text) | ThinkingDelta(text) | InputJsonDelta(text):
                    pieces.append(text)
                case SignatureDelta(signature):
                    pass
    return blocks


def _filled(block: Block, text: str, signature: str) -> Block:
    if isinstance(block, TextBlock):
        return TextBlock(text)
    if isinstance(block, ThinkingBlock):
        return ThinkingBlock(text, signature)
    # Exactly as streamed; ToolInput has made it an object.
    return ToolUseBlock(block.id, block.name, cast(dict[str, Any], msgspec.Raw(text.encode())))
