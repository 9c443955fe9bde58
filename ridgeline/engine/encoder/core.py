"""EncoderCore: the body of an encoder's loop: queue, runner and the engine's own metrics.

Driven by `encoder_loop`. A step is one forward pass over whole texts of several requests; no state is
kept between steps. An error in one request does not affect the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from ridgeline.engine.encoder.text_queue import Portion, TextQueue, TextRequest
from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.link.messages import Embed
from ridgeline.telemetry.stats import EngineStats, StepRecord
from ridgeline.telemetry.step_ring import StepRing

log = logging.getLogger(__name__)

Want = Literal["vector", "tokens", "score"]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int32]]
RATE_SHARE = 0.2  # weight of the newest step in the rate used for Retry-After


class EncoderRunner(Protocol):
    def encode(self, token_ids: Ints, text_starts: Ints, type_ids: Ints | None, want: Want) -> Floats:
        """One row per text, or per token if requested."""
        ...


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    step_tokens: int
    max_text_tokens: int
    vocab_size: int
    num_types: int
    max_waiting: int
    wants: tuple[Want, ...]
    max_waiting_tokens: int = 4 << 20


@dataclass(slots=True)
class _Open:
    """An open request: its tokens, and the number of texts without an answer."""

    want: Want
    tokens: Ints
    types: Ints | None
    starts: Ints
    request: TextRequest
    unanswered: int = field(init=False)

    def __post_init__(self) -> None:
        self.unanswered = len(self.request.lengths)


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of one request's answer, or why it failed; `is_last`: nothing more follows."""

    name: str
    row: int
    values: bytes
    is_last: bool
    error: str | None = None


class EncoderCore:
    def __init__(
        self,
        runner: EncoderRunner,
        limits: EncoderLimits,
        ring_size: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.steps = StepRing(ring_size)
        self._runner = runner
        self._clock = clock
        self._queue = TextQueue(limits.step_tokens, limits.max_waiting, limits.max_waiting_tokens)
        self._open: dict[str, _Open] = {}
        self._computed_tokens = self._num_steps = 0
        self._last_step_end = self._busy_s = 0.0

    def add(self, name: str, message: Embed) -> None:
        """Queue the texts. Raises InvalidRequest or QueueFull; the engine is then unchanged."""
        opened = self._checked(name, message)
        self._queue.add(opened.request)
        self._open[name] = opened

    def abort(self, name: str) -> None:
        """Abort a request. Unknown names are ignored: it may just have finished."""
        if self._open.pop(name, None) is not None:
            self._queue.remove(name)

    @property
    def has_work(self) -> bool:
        return len(self._queue) > 0

    def step(self) -> list[EncodedRows]:
        """One forward pass for each kind of answer requested: nearly always one."""
        started = self._clock()
        portions = self._queue.take()
        planned = self._clock()
        answers: list[EncodedRows] = []
        for want in dict.fromkeys(self._open[portion.request.name].want for portion in portions):
            answers += self._compute(want, [p for p in portions if self._open[p.request.name].want == want])
        self._record(portions, started, planned)
        for answer in answers:
            if answer.is_last:
                self.abort(answer.name)
        return answers

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._queue),
            steps=self._num_steps,
            prompt_tokens=self._computed_tokens,
            prefill_tokens=self._computed_tokens,
            busy_s=self._busy_s,
            last_step_end=self._last_step_end,
            step_tokens=self.limits.step_tokens,
        )

    # ---- the parts of a step ----

    def _compute(self, want: Want, portions: list[Portion]) -> list[EncodedRows]:
        try:
            return self._together(want, portions)
        except Exception:
            log.exception("a step of %d requests failed; computing each on its own", len(portions))
        answers: list[EncodedRows] = []
        for portion in portions:
            try:
                answers += self._together(want, [portion])
            except Exception as error:
                reason = f"the forward pass failed: {type(error).__name__}: {error}"
                answers.append(EncodedRows(portion.request.name, 0, b"", True, reason))
        return answers

    def _together(self, want: Want, portions: list[Portion]) -> list[EncodedRows]:
        pieces = [self._piece(portion) for portion in portions]
        lengths = [length for p in portions for length in p.request.lengths[p.first : p.end]]
        typed = any(types is not None for _, types in pieces)
        values = self._runner.encode(
            np.concatenate([tokens for tokens, _ in pieces]),
            np.cumsum([0, *lengths], dtype=np.int32),
            np.concatenate([np.zeros_like(tokens) if types is None else types for tokens, types in pieces])
            if typed
            else None,
            want,
        )
        answers, at = [], 0
        for portion in portions:
            opened = self._open[portion.request.name]
            row, end = (
                (int(opened.starts[portion.first]), int(opened.starts[portion.end]))
                if want == "tokens"
                else (portion.first, portion.end)
            )
            rows = values[at : at + end - row]
            at += end - row
            opened.unanswered -= portion.end - portion.first
            answers.append(EncodedRows(portion.request.name, row, rows.tobytes(), not opened.unanswered))
        return answers

    def _piece(self, portion: Portion) -> tuple[Ints, Ints | None]:
        opened = self._open[portion.request.name]
        inside = slice(int(opened.starts[portion.first]), int(opened.starts[portion.end]))
        return opened.tokens[inside], None if opened.types is None else opened.types[inside]

    def _checked(self, name: str, message: Embed) -> _Open:
        limits, lengths = self.limits, message.lengths
        tokens: Ints = np.frombuffer(message.tokens, np.int32)
        if message.want not in limits.wants:
            raise InvalidRequest("model", f"this encoder cannot return {message.want}")
        if not lengths or min(lengths) < 1 or sum(lengths) != len(tokens):
            raise InvalidRequest("input", "is empty, or contains a text without tokens")
        if max(lengths) > limits.max_text_tokens:
            place = next(i for i, length in enumerate(lengths) if length > limits.max_text_tokens)
            raise InvalidRequest(
                f"input[{place}]",
                f"has {lengths[place]} tokens; the model's limit is {limits.max_text_tokens}",
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size:
            raise InvalidRequest("input", f"has a token id outside 0 to {limits.vocab_size - 1}")
        types = np.frombuffer(message.types, np.uint8).astype(np.int32) if message.types else None
        if types is not None and (len(types) != len(tokens) or int(types.max()) >= max(limits.num_types, 1)):
            raise InvalidRequest("input", "has token types that do not fit the tokens or the model")
        starts: Ints = np.cumsum([0, *lengths], dtype=np.int32)
        return _Open(message.want, tokens, types, starts, TextRequest(name, lengths, message.priority))

    def _record(self, portions: list[Portion], started: float, planned: float) -> None:
        ended = self._clock()
        lengths = [length for p in portions for length in p.request.lengths[p.first : p.end]]
        tokens = sum(lengths)
        self.steps.append(
            StepRecord(
                step_id=self._num_steps,
                start=started,
                prefill_tokens=tokens,
                prefill_rows=len(lengths),
                prefill_context_product=sum(length * length for length in lengths),
                decode_batch=0,
                decode_context=0,
                wall_s=ended - planned,
                schedule_s=planned - started,
                busy_s=ended - max(planned, self._last_step_end),
            )
        )
        if ended > planned:
            rate = tokens / (ended - planned)
            self._queue.tokens_per_s += RATE_SHARE * (rate - self._queue.tokens_per_s)
        self._num_steps += 1
        self._computed_tokens += tokens
        self._busy_s += ended - max(started, self._last_step_end)
        self._last_step_end = ended
