"""Conversations: which turn can be sent when, and its prompt.

The load asks for a prompt when it sends, and reports how each answer ended; a turn is due `think_s` after the
previous answer, with that answer in its history. Single requests pass through unchanged. Pure bookkeeping: no
clock, no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridgeline.lab.bench.config import Api
from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.prompts import Form, Prompt, PromptMaker
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The turn released by an answer, due this many seconds after it."""

    index: int
    think_s: float


@dataclass(slots=True)
class _History:
    """The conversation so far, for the next prompt; `tokens`: its total as the server counts."""

    said: str | list[dict[str, str]]
    tokens: int


def form_of(traffic: Traffic, api: Api, vocabulary: Vocabulary) -> Form:
    """How prompts are sent: as token ids where they are known, because they are exact. Histories are text,
    because a server's answers are text.
    """
    if api == "chat":
        return "chat"
    has_turns = any(request.turn for request in traffic.requests)
    return "ids" if vocabulary.ids and not has_turns else "text"


class Conversations:
    def __init__(self, traffic: Traffic, maker: PromptMaker) -> None:
        self._requests = traffic.requests
        self._maker = maker
        self._next: dict[int, int] = {}  # the next turn of each, by index
        self._before: dict[int, int] = {}
        self._histories: dict[int, _History] = {}  # by conversation; removed when it has ended
        last: dict[int, int] = {}
        for index, request in enumerate(traffic.requests):
            if request.conversation is None:
                continue
            before = last.get(request.conversation)
            if (before is None) != (request.turn == 0):
                raise BadInput(
                    f"{traffic.name}: conversation {request.conversation} has no turn before {request.turn}"
                )
            if before is not None:
                self._next[before], self._before[index] = index, before
            last[request.conversation] = index
        if self._next and maker.form == "ids":
            raise BadInput("conversations are sent as text or messages: token ids of answers are not known")

    def openers(self) -> list[int]:
        """Requests with their own start time: single requests and first turns, by index."""
        return [index for index, request in enumerate(self._requests) if request.turn == 0]

    def prompt(self, index: int) -> Prompt:
        """Called once, when the request is sent."""
        planned = self._requests[index]
        if planned.said is not None:
            return Prompt(_given_fields(planned.said, self._maker.form), 0)
        if planned.conversation is None:
            return self._maker.prompt(index, planned)
        if planned.turn == 0:
            made = self._maker.prompt(index, planned)
        else:
            made = self._later(index, self._histories[planned.conversation])
        said: Any = made.fields["messages" if self._maker.form == "chat" else "prompt"]
        self._histories[planned.conversation] = _History(said, made.tokens)
        return made

    def answered(
        self, index: int, text: str, n_in: int | None = None, n_out: int | None = None
    ) -> FollowUp | None:
        """A successful answer. n_in, n_out: tokens as the server counts them, if it does."""
        planned = self._requests[index]
        if planned.conversation is None:
            return None
        after = self._next.get(index)
        if after is None:
            self._histories.pop(planned.conversation, None)
            return None
        history = self._histories[planned.conversation]
        tokens = (history.tokens if n_in is None else n_in) + (
            planned.output_tokens if n_out is None else n_out
        )
        self._histories[planned.conversation] = _History(_with_answer(history.said, text), tokens)
        return FollowUp(after, self._requests[after].think_s)

    def failed(self, index: int) -> list[int]:
        """A failed answer: returns the following turns, which cannot be sent."""
        conversation = self._requests[index].conversation
        if conversation is not None:
            self._histories.pop(conversation, None)
        lost = []
        after = self._next.get(index)
        while after is not None:
            lost.append(after)
            after = self._next.get(after)
        return lost

    def _later(self, index: int, history: _History) -> Prompt:
        """The history and new words: as many as the plan has between the previous answer and this turn."""
        planned, before = self._requests[index], self._requests[self._before[index]]
        new = planned.input_tokens - before.input_tokens - before.output_tokens
        added = self._maker.vocabulary.turn_overhead if self._maker.form == "chat" else 0
        words = self._maker.own_words(index, planned.turn, new - added)
        tokens = history.tokens + len(words) + added
        text = self._maker.text(words)
        if isinstance(history.said, str):
            return Prompt({"prompt": f"{history.said} {text}"}, tokens)
        return Prompt({"messages": [*history.said, {"role": "user", "content": text}]}, tokens)


def _given_fields(said: str | tuple[dict[str, Any], ...], form: Form) -> dict[str, Any]:
    """A prompt given by the user, in the API's form."""
    if form == "chat":
        return {"messages": [{"role": "user", "content": said}] if isinstance(said, str) else list(said)}
    if not isinstance(said, str):
        raise BadInput("prompts with messages are for chat: give --api chat")
    return {"prompt": said}


def _with_answer(said: str | list[dict[str, str]], text: str) -> str | list[dict[str, str]]:
    if isinstance(said, str):
        return said + text
    return [*said, {"role": "assistant", "content": text}]
