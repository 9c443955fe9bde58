"""Submission: submits the engine requests of one job, in parts if it asks for more than can run together.

1,024 prompts at once would fill the engine's queue, and one prompt's 128 samples may exceed what runs
together. At most twice as many choices as can run together are submitted; the next follow as those end. Used
by `RunningRequest`; chunks enter its inbox under the number of their prompt, as if all were one request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.engine.client.inbox import Inbox
from ridgeline.engine.client.open_request import OpenRequest
from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.client.text import TextStream
from ridgeline.engine.errors import QueueFull
from ridgeline.engine.schedule.intake import sample_seed
from ridgeline.engine.schedule.request import SamplingParams

RETRY_S = 0.5  # after the engine's queue was full


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Samples `first` to `first + params.n` of one prompt, as one engine request.

    output_ids: of a single sample that continues another server's; `text` has replayed them
    """

    prompt: int
    first: int
    params: SamplingParams
    output_ids: Sequence[int] = ()
    text: TextStream | None = None


Submit = Callable[[Part, Inbox], OpenRequest]


def parts_of(
    prompts: int, params: SamplingParams, max_running: int, seeds: Sequence[int] | None = None
) -> list[Part]:
    """Every sample of every prompt once, with the seed it would have in a single request.

    seeds: one for each prompt, if they are already drawn
    """
    if params.n <= max_running:
        if seeds is None:
            return [Part(number, 0, params) for number in range(prompts)]
        return [Part(number, 0, replace(params, seed=seeds[number])) for number in range(prompts)]
    parts = []
    for number in range(prompts):
        seed = _seed(params, seeds, number)
        parts.append(Part(number, 0, replace(params, n=max_running, seed=seed)))
        # A request's seed is that of its first sample, so the other samples are separate requests.
        parts += [
            Part(number, index, replace(params, n=1, seed=sample_seed(seed, index), prompt_logprobs=None))
            for index in range(max_running, params.n)
        ]
    return parts


def continued_parts(
    prompts: int,
    params: SamplingParams,
    seeds: Sequence[int] | None,
    outputs: Mapping[int, Sequence[int]],
    texts: Mapping[int, TextStream],
    ended: Collection[int],
) -> list[Part]:
    """The choices of a continued stream that have not ended, each as its own engine request.

    outputs: the tokens of the choices that have begun. A choice that opens with its prompt's
    log-probabilities has them computed again; one request of each prompt does it for all of them.
    """
    parts = []
    for number in range(prompts):
        seed = _seed(params, seeds, number)
        asked = params.prompt_logprobs
        for index in range(params.n):
            choice = number * params.n + index
            if choice in ended:
                continue
            output = outputs.get(choice, ())
            own = replace(
                params, n=1, seed=sample_seed(seed, index), prompt_logprobs=None if output else asked
            )
            parts.append(Part(number, index, own, output, texts.get(choice)))
            asked = asked if output else None
    return parts


def _seed(params: SamplingParams, seeds: Sequence[int] | None, number: int) -> int:
    if seeds is not None:
        return seeds[number]
    return secrets.randbits(63) if params.seed is None else params.seed


class Submission:
    def __init__(self, parts: Sequence[Part], max_running: int, inbox: Inbox, submit: Submit) -> None:
        self._waiting = deque(parts)
        self._most = 2 * max_running
        fits = sum(part.params.n for part in parts) <= self._most
        # Chunks of a part that begins with another sample are renumbered on their way.
        self._is_whole = fits and not any(part.first for part in parts)
        self._inbox = inbox
        self._submit = submit
        self._under_way = 0  # choices
        self._open: dict[Part, OpenRequest] = {}
        self._retry: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self._is_whole:  # the common case: chunks go straight to the inbox
            while self._waiting:
                part = self._waiting.popleft()
                self._open[part] = self._submit(part, self._inbox)
            return
        self._first = self._waiting[0]
        self._inbox.open_requests += len(self._waiting)
        self._fill()

    def close(self) -> None:
        """Submit nothing more, and abort what is running."""
        self._waiting.clear()
        if self._retry is not None:
            self._retry.cancel()
        for request in list(self._open.values()):
            request.close()

    def _fill(self) -> None:
        self._retry = None
        while self._waiting and (self._under_way + self._waiting[0].params.n <= self._most):
            part = self._waiting.popleft()
            self._under_way += part.params.n
            self._open[part] = self._submit(part, _PartInbox(self, part))

    def put(self, part: Part, chunk: OutputChunk) -> None:
        chunk.index += part.first
        self._inbox.put(part.prompt, chunk)

    def ended(self, part: Part, error: Exception | None) -> None:
        """Called when an engine request has ended. A part that found the queue full is submitted again,
        unless it was the first: then the whole request is refused.
        """
        self._under_way -= part.params.n
        self._open.pop(part, None)
        if isinstance(error, QueueFull) and part is not self._first:
            self._waiting.appendleft(part)
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._fill)
            return
        if error is not None:
            self._waiting.clear()
            self._inbox.fail(error)
        self._inbox.end_request()
        if self._retry is None:
            self._fill()


class _PartInbox(Inbox):
    """Receives the chunks of one part from the engine's client."""

    def __init__(self, submission: Submission, part: Part) -> None:
        super().__init__()
        self._submission = submission
        self._part = part
        self._failure: Exception | None = None

    def put(self, number: int, chunk: OutputChunk) -> None:
        self._submission.put(self._part, chunk)

    def fail(self, error: Exception) -> None:
        self._failure = error

    def end_request(self) -> None:
        self._submission.ended(self._part, self._failure)
