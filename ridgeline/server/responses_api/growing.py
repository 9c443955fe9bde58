"""Output items under construction: each emits the events of its start, every addition and its end.

Created and driven by `ResponseShape`, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import UNSET

from ridgeline.server.openai_api.response_bodies import ChatLogprob
from ridgeline.server.responses_api import bodies
from ridgeline.server.responses_api.bodies import (
    FileCitation,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from ridgeline.server.responses_api.event_writer import Deltas, EventWriter

Cite = Callable[[str], list[FileCitation]]  # a whole text's citations


class GrowingItem(Protocol):
    def add(self, text: str, logprobs: list[ChatLogprob]) -> None: ...

    def done(self, status: ItemStatus) -> OutputItem: ...


class GrowingText:
    """The assistant's text: a message of one part."""

    def __init__(self, events: EventWriter, output_index: int, cite: Cite | None = None) -> None:
        self._events = events
        self._cite = cite
        self._at: dict[str, Any] = {"output_index": output_index, "item_id": events.new_id("msg")}
        self._texts: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        events.write(bodies.ItemAdded, output_index=output_index, item=self._item("in_progress", []))
        events.write(bodies.PartAdded, **self._at, part=self._part(""))
        self._deltas = Deltas(bodies.TextDelta, **self._at, logprobs=[])

    def add(self, text: str, logprobs: list[ChatLogprob]) -> None:
        self._texts.append(text)
        if not logprobs:
            self._events.write_delta(self._deltas, text)
            return
        self._logprobs += logprobs
        self._events.write(bodies.TextDelta, **self._at, delta=text, logprobs=logprobs)

    def done(self, status: ItemStatus) -> MessageItem:
        text = "".join(self._texts)
        part = self._part(text, self._cite(text) if self._cite is not None else [])
        for i, annotation in enumerate(part.annotations):
            self._events.write(bodies.AnnotationAdded, **self._at, annotation_index=i, annotation=annotation)
        self._events.write(bodies.TextDone, **self._at, text=part.text, logprobs=part.logprobs)
        self._events.write(bodies.PartDone, **self._at, part=part)
        item = self._item(status, [part])
        self._events.write(bodies.ItemDone, output_index=self._at["output_index"], item=item)
        return item

    def _part(self, text: str, annotations: Sequence[FileCitation] = ()) -> OutputText:
        return OutputText(text=text, annotations=list(annotations), logprobs=self._logprobs)

    def _item(self, status: ItemStatus, content: list[Any]) -> MessageItem:
        return MessageItem(id=self._at["item_id"], status=status, role="assistant", content=content)


class GrowingReasoning:
    """The model's reasoning: an item of one part, without a summary."""

    def __init__(self, events: EventWriter, output_index: int) -> None:
        self._events = events
        self._at: dict[str, Any] = {"output_index": output_index, "item_id": events.new_id("rs")}
        self._texts: list[str] = []
        events.write(bodies.ItemAdded, output_index=output_index, item=self._item("in_progress", []))
        events.write(bodies.PartAdded, **self._at, part=ReasoningText(text=""))
        self._deltas = Deltas(bodies.ReasoningDelta, **self._at)

    def add(self, text: str, logprobs: list[ChatLogprob]) -> None:
        self._texts.append(text)
        self._events.write_delta(self._deltas, text)

    def done(self, status: ItemStatus) -> ReasoningItem:
        part = ReasoningText(text="".join(self._texts))
        self._events.write(bodies.ReasoningDone, **self._at, text=part.text)
        self._events.write(bodies.PartDone, **self._at, part=part)
        item = self._item(status, [part])
        self._events.write(bodies.ItemDone, output_index=self._at["output_index"], item=item)
        return item

    def _item(self, status: ItemStatus, content: list[ReasoningText]) -> ReasoningItem:
        return ReasoningItem(id=self._at["item_id"], summary=[], content=content, status=status)


class GrowingCall:
    """A function call: its name is known at the start, its arguments grow."""

    def __init__(
        self, events: EventWriter, output_index: int, call_id: str, namespace: str | None, name: str
    ) -> None:
        self._events = events
        self._namespace = namespace
        self._at: dict[str, Any] = {"output_index": output_index, "item_id": events.new_id("fc")}
        self._call_id = call_id
        self._name = name
        self._texts: list[str] = []
        events.write(bodies.ItemAdded, output_index=output_index, item=self._item("in_progress", ""))
        self._deltas = Deltas(bodies.ArgumentsDelta, **self._at)

    def add(self, text: str, logprobs: list[ChatLogprob]) -> None:
        self._texts.append(text)
        self._events.write_delta(self._deltas, text)

    def done(self, status: ItemStatus) -> FunctionCallItem:
        arguments = "".join(self._texts)
        self._events.write(bodies.ArgumentsDone, **self._at, name=self._name, arguments=arguments)
        item = self._item(status, arguments)
        self._events.write(bodies.ItemDone, output_index=self._at["output_index"], item=item)
        return item

    def _item(self, status: ItemStatus, arguments: str) -> FunctionCallItem:
        return FunctionCallItem(
            id=self._at["item_id"],
            call_id=self._call_id,
            name=self._name,
            namespace=self._namespace or UNSET,
            arguments=arguments,
            status=status,
        )
