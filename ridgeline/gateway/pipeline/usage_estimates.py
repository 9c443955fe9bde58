"""UsageEstimates: fills in usage that an upstream may bill but has not reported.

Texts are counted with the tokenizer of [[models]], else by the formula of `accounting.token_formula`.
"""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import NamedTuple

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.token_formula import (
    PROMPT_FIELDS,
    answer_tokens,
    answer_tokens_so_far,
    prompt_tokens,
    unseen_tokens,
)
from ridgeline.gateway.accounting.tokenizer_counts import TokenizerCounts, unescaped
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import Fields
from ridgeline.gateway.dialects.counts import AUDIO
from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.objects.audio_length import audio_length_s
from ridgeline.gateway.offload.offload import LARGE, plain
from ridgeline.gateway.pipeline.most_used import GENERATING, most_used
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import RequestState
from ridgeline.gateway.upstreams.outgoing import Target

FREE = frozenset({"count_tokens"})  # kinds that no provider bills
AUDIO_PER_S = 10  # tokens per second of audio input,
SPEECH_PER_S = 21  # and of audio output, as OpenAI counts
SPOKEN_PER_S = 12  # characters per second: a slow rate, so that the audio is estimated long


class OutputBound(NamedTuple):
    """answers: number of parallel answers, 0 for a kind without output. limit: tokens of one answer."""

    answers: int
    limit: int | None


class UsageEstimates:
    def __init__(self, parts: Parts) -> None:
        self._catalog, self._prices = parts.catalog, parts.prices
        self._offload = parts.offload
        self._counts = TokenizerCounts()
        self._weighing = asyncio.Lock()  # of one piece of an answer: bounds the time on the event loop

    def is_due(self, request: RequestState) -> bool:
        """Whether an upstream may bill the request and has not reported all of its usage."""
        if request.place.endpoint.kind in FREE:
            return False
        if request.usage is not None:
            return request.usage.source == "estimated"
        return request.late_usage or request.answer is not None

    def is_slow(self, request: RequestState) -> bool:
        """Whether the count needs a tokenizer, in a thread or an offload process, or many steps."""
        if not self.is_due(request):
            return False
        has_tokenizer = request.place.endpoint.kind not in AUDIO and self._tokenizer_file(request) is not None
        return has_tokenizer or self.is_long(request)

    def is_long(self, request: RequestState) -> bool:
        """Whether the answer is too long for one step."""
        return len(self._written(request)) > LARGE

    async def fill(self, request: RequestState) -> None:
        file = self._tokenizer_file(request)
        if file is None or request.place.endpoint.kind in AUDIO:
            await self.fill_by_formula(request)
            return
        fields = plain({name: request.fields[name] for name in PROMPT_FIELDS if name in request.fields})
        answer, texts = request.answer, request.texts
        if sum(map(len, (*fields.values(), answer or b"", *texts))) > LARGE:
            counted = await self._offload.run(request.tenant, "count_tokens", file, fields, answer, texts)
        else:
            counted = await asyncio.to_thread(self._counts.count, file, fields, answer, texts)
        self._fill(request, *counted)

    async def fill_by_formula(self, request: RequestState) -> None:
        """Estimate a long answer piece by piece, and yield to the event loop between pieces."""
        if not self.is_long(request):
            self.fill_now(request)
            return
        answered = 0
        steps = answer_tokens_so_far(self._written(request))
        while True:
            async with self._weighing:
                step = next(steps, None)
                await asyncio.sleep(0)
            if step is None:
                break
            answered = step
        self._fill_by_formula(request, answered)

    def fill_now(self, request: RequestState) -> None:
        """By the formula, in one step."""
        self._fill_by_formula(request, answer_tokens(self._written(request)))

    def _fill_by_formula(self, request: RequestState, answered: int) -> None:
        if request.place.endpoint.kind in AUDIO:
            self._fill_audio(request, answered)
        else:
            self._fill(request, self.input_tokens(request), answered)

    def _written(self, request: RequestState) -> bytes:
        """The answer if it is text of the model; vectors, scores and audio are not."""
        kind = request.place.endpoint.kind
        is_text = kind in GENERATING or (kind in AUDIO and kind != "speech")
        return request.answer or b"" if is_text else b""

    def input(self, request: RequestState, model: str, target: Target) -> Usage:
        """The input of a request, in the units of this target's price."""
        kind = request.place.endpoint.kind
        if kind not in AUDIO:
            return Usage(self.input_tokens(request))
        prices = self._prices.of(model, target.upstream, target.model)
        used = self.audio(request)
        if kind == "speech" and not prices.character and (prices.fresh or prices.out):
            used.tokens_in = self.input_tokens(request)
            used.tokens_out = used.audio_out = math.ceil(used.characters / SPOKEN_PER_S * SPEECH_PER_S)
        elif kind != "speech" and not prices.minute and (prices.fresh or prices.audio_in):
            used.tokens_in = used.audio_in = math.ceil(used.audio_ms / 1000 * AUDIO_PER_S)
        return used

    def audio(self, request: RequestState) -> Usage:
        """Audio in the request, and text for speech."""
        text = request.fields.get("input")
        spoken = request.place.endpoint.kind == "speech" and text is not None
        return Usage(
            audio_ms=request.audio_ms,
            characters=len(unescaped(bytes(text)[1:-1])) if spoken and text else 0,
        )

    def input_tokens(self, request: RequestState) -> int:
        if request.input_estimate is None:
            request.input_estimate = prompt_tokens(request.fields)
        return request.input_estimate

    def output_bound(self, request: RequestState) -> OutputBound:
        kind = request.place.endpoint.kind
        if kind not in GENERATING:
            return OutputBound(0, 0)
        try:
            counts = request.prompt_counts
            answers = most_used(kind, _without_limits(request.fields), 0, 1, counts).tokens_out
            limit = most_used(kind, request.fields, 0, 0, counts).tokens_out // max(answers, 1)
        except GatewayError:
            return OutputBound(1, None)
        return OutputBound(answers, limit or None)

    def _fill(self, request: RequestState, tokens_in: int, answered: int) -> None:
        usage = request.usage or Usage()
        bound = self.output_bound(request)
        usage.source = "estimated"
        usage.tokens_in = usage.tokens_in or tokens_in
        if not bound.answers:
            usage.tokens_out = 0
        elif request.answer is not None or answered:
            usage.tokens_out = answered
        elif not usage.tokens_out:
            seconds = time.monotonic() - request.asked_at
            usage.tokens_out = unseen_tokens(seconds, bound.limit, bound.answers)
        request.usage = usage

    def _fill_audio(self, request: RequestState, answered: int) -> None:
        """Seconds and characters are billed; tokens in their place are an estimate."""
        row = request.row
        used = self.input(request, row.model, Target(row.upstream, row.upstream_model))
        answer = request.answer
        if answer and used.tokens_in and request.place.endpoint.kind == "speech":
            seconds, is_known = audio_length_s(lambda at, most: answer[at : at + most], len(answer))
            if is_known:
                used.tokens_out = used.audio_out = math.ceil(seconds * SPEECH_PER_S)
        elif answer and used.tokens_in:
            used.tokens_out = answered
        is_told = answer is not None and (request.audio_told or not request.audio_ms)
        used.source = "counted" if is_told and not used.tokens_in else "estimated"
        request.usage = used

    def _tokenizer_file(self, request: RequestState) -> Path | None:
        model = request.row.model
        return self._catalog.find(model).config.tokenizer if model else None


def limit_tokens(used: Usage | LedgerRow) -> int:
    """A request's tokens for limits: seconds of audio and characters at their usual rate."""
    tokens = used.tokens_in + used.tokens_out
    return tokens or math.ceil(used.audio_ms / 1000 * AUDIO_PER_S) + math.ceil(used.characters / 4)


def _without_limits(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if not name.startswith("max_")}
