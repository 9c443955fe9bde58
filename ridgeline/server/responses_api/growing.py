"""Output items while they grow: each tells the events of its beginning, of every addition, and of its end.

Made and driven by `ResponseShape`, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ridgeline.server.bodies import ChatLogprob
from ridgeline.server.responses_api import bodies
from ridgeline.server.responses_api.bodies import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from ridgeline.server.responses_api.items import new_id

Tell = Callable[..., None]  # tell(kind of event, **its fields)


class GrowingItem(Protocol):
    def add(self, text: str, logprobs: list[ChatLogprob]) -> None: ...

    def done(self, status: ItemStatus) -> OutputItem: ...


class GrowingText:
    """What the assistant says: a message of one part."""

    def __init__(self, tell: Tell, output_index: int) -> None:
        self._tell = tell
        self._at: dict[str, Any] = {"output_index": output_index, "item_id": new_id("msg")}
        self._texts: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        tell(bodies.ItemAdded, output_index=output_index, item=self._item("in_progress", []))
        tell(bodies.PartAdded, **self._at, part=self._part(""))

    def add(self, text: str, logprobs: list[ChatLogprob]) -> None:
        self._texts.append(text)
        self._logprobs += logprobs
        self._tell(bodies.TextDelta, **self._at, delta=text, logprobs=logprobs)

    def done(self, status: ItemStatus) -> MessageItem:
        part = self._part("".join(self._texts))
        self._tell(bodies.TextDone, **self._at, text=part.text, logprobs=part.logprobs)
        self._tell(bodies.PartDone, **self._at, part=part)
        item = self._item(status, [part])
        self._tell(bodies.ItemDone, output_index=self._at["output_index"], item=item)
        return item

    def _part(self, text: str) -> OutputText:
        return OutputText(text=text, annotations=[], logprobs=self._logprobs)

    def _item(self, status: ItemStatus, content: list[Any]) -> MessageItem:
        return MessageItem(id=self._at["item_id"], status=status, role="assistant", content=content)


class GrowingReasoning:
    """What the model thinks before it answers: an item of one part, and no summary."""

    def __init__(self, tell: Tell, output_index: int) -> None:
        self._tell = tell
        self._at: dict[str, Any] = {"output_index": output_index, "item_id": new_id("rs")}
        self._texts: list[str] = []
        tell(bodies.ItemAdded, output_index=output_index, item=self._item("in_progress", []))
        tell(bodies.PartAdded, **self._at, part=ReasoningText(text=""))

    def add(self, text: str, logprobs: list[ChatLogprob]) -> None:
        self._texts.append(text)
        self._tell(bodies.ReasoningDelta, **self._at, delta=text)

    def done(self, status: ItemStatus) -> ReasoningItem:
        part = ReasoningText(text="".join(self._texts))
        self._tell(bodies.ReasoningDone, **self._at, text=part.text)
        self._tell(bodies.PartDone, **self._at, part=part)
        item = self._item(status, [part])
        self._tell(bodies.ItemDone, output_index=self._at["output_index"], item=item)
        return item

    def _item(self, status: ItemStatus, content: list[ReasoningText]) -> ReasoningItem:
        return ReasoningItem(id=self._at["item_id"], summary=[], content=content, status=status)


class GrowingCall:
    """A call of a function: its name is known when it begins, its arguments grow."""

    def __init__(self, tell: Tell, output_index: int, call_id: str, name: str) -> None:
        self._tell = tell
        self._at: dict[str, Any] = {"output_index": output_index, "item_id": new_id("fc")}
        self._call_id = call_id
        self._name = name
        self._texts: list[str] = []
        tell(bodies.ItemAdded, output_index=output_index, item=self._item("in_progress", ""))

    def add(self, text: str, logprobs: list[ChatLogprob]) -> None:
        self._texts.append(text)
        self._tell(bodies.ArgumentsDelta, **self._at, delta=text)

    def done(self, status: ItemStatus) -> FunctionCallItem:
        arguments = "".join(self._texts)
        self._tell(bodies.ArgumentsDone, **self._at, name=self._name, arguments=arguments)
        item = self._item(status, arguments)
        self._tell(bodies.ItemDone, output_index=self._at["output_index"], item=item)
        return item

    def _item(self, status: ItemStatus, arguments: str) -> FunctionCallItem:
        return FunctionCallItem(
            id=self._at["item_id"],
            call_id=self._call_id,
            name=self._name,
            arguments=arguments,
            status=status,
        )
