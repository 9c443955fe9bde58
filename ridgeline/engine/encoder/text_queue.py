"""TextQueue: chooses the texts of an encoder's next step, so that a large request does not delay small ones.

Pure logic, no tensors, no clock. `EncoderCore` owns it. A request is a list of texts that may be computed in
any number of steps; no state is kept between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.engine.errors import QueueFull

DEFAULT_TOKENS_PER_S = 5_000.0  # until a step has been timed


@dataclass(slots=True, eq=False)
class TextRequest:
    """Texts by their lengths; those before `next_text` have been handed out."""

    name: str
    lengths: list[int]
    priority: int = 0
    next_text: int = 0

    @property
    def left(self) -> int:
        return len(self.lengths) - self.next_text


@dataclass(frozen=True, slots=True)
class Portion:
    """Texts first … end - 1 of a request, for one step."""

    request: TextRequest
    first: int
    end: int


class TextQueue:
    """Requests are served round robin, lower priority numbers first, as everywhere in the engine."""

    def __init__(self, step_tokens: int, max_waiting: int, max_waiting_tokens: int) -> None:
        """step_tokens: the budget of one step; no text may be longer."""
        self._step_tokens = step_tokens
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._requests: dict[str, TextRequest] = {}  # in service order
        self.waiting_tokens = 0
        self.tokens_per_s = DEFAULT_TOKENS_PER_S

    def add(self, request: TextRequest) -> None:
        """Raises QueueFull; the queue is then unchanged. A request is always accepted into an empty queue."""
        tokens = sum(request.lengths)
        full = len(self._requests) >= self._max_waiting
        if full or (self._requests and self.waiting_tokens + tokens > self._max_waiting_tokens):
            raise QueueFull(len(self._requests), self.waiting_tokens / self.tokens_per_s)
        self._requests[request.name] = request
        self.waiting_tokens += tokens

    def remove(self, name: str) -> None:
        """Remove an aborted request. Unknown names are ignored: it may just have been handed out."""
        request = self._requests.pop(name, None)
        if request is not None:
            self.waiting_tokens -= sum(request.lengths[request.next_text :])

    def take(self) -> list[Portion]:
        """The next step's texts. Each request gets an equal share first; the rest goes in order."""
        starts = {name: request.next_text for name, request in self._requests.items()}
        room = self._step_tokens
        for requests in self._by_priority():
            share = room // len(requests)
            for request in requests:
                room -= self._give(request, min(share, room), room)
            for request in requests:
                room -= self._give(request, room, room)
        taken = [
            Portion(request, starts[name], request.next_text)
            for name, request in self._requests.items()
            if request.next_text > starts[name]
        ]
        for portion in taken:  # a served request moves to the end; a complete one is removed
            request = self._requests.pop(portion.request.name)
            if request.left:
                self._requests[request.name] = request
        return taken

    def __len__(self) -> int:
        return len(self._requests)

    def _give(self, request: TextRequest, share: int, room: int) -> int:
        """Take texts up to `share` tokens, and one longer text if `room` allows. Returns the tokens taken."""
        given = 0
        while request.left:
            length = request.lengths[request.next_text]
            if given + length > (share if given else room):
                break
            request.next_text += 1
            given += length
        self.waiting_tokens -= given
        return given

    def _by_priority(self) -> Iterator[list[TextRequest]]:
        for priority in sorted({request.priority for request in self._requests.values()}):
            yield [request for request in self._requests.values() if request.priority == priority]
