"""Requests whose gateway died: usage comes from their upstream, else is estimated; they are booked as lost.

Called by the mover's thread when it has taken over a dead worker's files; asks upstreams on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future

from ridgeline.gateway.accounting.row import LedgerRow, Opening
from ridgeline.gateway.accounting.token_formula import unseen_tokens
from ridgeline.gateway.accounting.usage import Usage

# A request's final usage, by its upstream, its id and its arrival (unix milliseconds). None: the upstream
# does not know it, or cannot be asked. Raises if it is unreachable or still at work: it is asked again.
UsageOf = Callable[[str, str, int], Awaitable[Usage | None]]
# (public model, upstream, the model's name there, usage) → picodollars and where the price is from.
CostOf = Callable[[str, str, str, Usage], tuple[int, str]]

_AT_ONCE = 16
_PAUSE_S = 0.5
# An upstream that does not know a request may not have seen its end yet.
_UNKNOWN_S = 3.0

logger = logging.getLogger("ridgeline.gateway.ledger")


class LostRows:
    """Rows that are complete once all upstreams have answered or the time limit has passed."""

    def __init__(self, answers: Future[list[LedgerRow]] | list[LedgerRow]) -> None:
        self._answers = answers

    def rows(self) -> list[LedgerRow] | None:
        """None: not yet."""
        if isinstance(self._answers, list):
            return self._answers
        return self._answers.result() if self._answers.done() else None


class LostRequests:
    """`usage_of` runs on `loop`; without it the opening's estimate is used."""

    def __init__(
        self,
        ask_s: float,
        cost_of: CostOf | None = None,
        usage_of: UsageOf | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._ask_s, self._cost_of, self._usage_of, self._loop = ask_s, cost_of, usage_of, loop

    def ask(self, openings: Sequence[Opening], died_ms: int) -> LostRows:
        """died_ms: when their gateway was last seen alive, unix milliseconds."""
        if self._usage_of is None or self._loop is None or not openings:
            return LostRows([self._row(opening, None, died_ms) for opening in openings])
        asking = self._ask_all(openings, self._usage_of, died_ms)
        try:
            return LostRows(asyncio.run_coroutine_threadsafe(asking, self._loop))
        except RuntimeError:  # the loop has closed: the next worker that takes over these files asks
            asking.close()
            raise

    async def _ask_all(self, openings: Sequence[Opening], usage_of: UsageOf, died_ms: int) -> list[LedgerRow]:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(opening: Opening) -> LedgerRow:
            async with turns:
                return self._row(opening, await self._ask(opening, usage_of), died_ms)

        return list(await asyncio.gather(*(one(opening) for opening in openings)))

    async def _ask(self, opening: Opening, usage_of: UsageOf) -> Usage | None:
        began = time.monotonic()
        while True:
            patience_s = self._ask_s
            try:
                asking = usage_of(opening.upstream, opening.request_id, opening.at_ms)
                usage = await asyncio.wait_for(asking, self._ask_s)
                if usage is not None:
                    return usage
                patience_s = min(_UNKNOWN_S, self._ask_s)
            except Exception as error:
                logger.info(
                    "asking %s for a lost request's usage failed: %s", opening.upstream, type(error).__name__
                )
            if time.monotonic() - began + _PAUSE_S > patience_s:
                return None
            await asyncio.sleep(_PAUSE_S)

    def _row(self, opening: Opening, told: Usage | None, died_ms: int) -> LedgerRow:
        usage = told or _estimate(opening, died_ms)
        cost, source = 0, "none"
        if self._cost_of is not None:
            cost, source = self._cost_of(opening.model, opening.upstream, opening.upstream_model, usage)
        return LedgerRow(
            request_id=opening.request_id,
            at_ms=opening.at_ms,
            key_id=opening.key_id,
            team_id=opening.team_id,
            endpoint=opening.endpoint,
            model_asked=opening.model_asked,
            model=opening.model,
            upstream=opening.upstream,
            upstream_model=opening.upstream_model,
            stream=opening.stream,
            outcome="lost",
            error_code="gateway_died",
            tokens_in=usage.tokens_in,
            tokens_cached=usage.tokens_cached,
            tokens_cache_write=usage.tokens_cache_write,
            tokens_out=usage.tokens_out,
            tokens_reasoning=usage.tokens_reasoning,
            audio_ms=usage.audio_ms,
            characters=usage.characters,
            usage_source=usage.source,
            cost_pusd=cost,
            price_source=source,
            attempts=1,
        )


def _estimate(opening: Opening, died_ms: int) -> Usage:
    """The input as it was counted, and what could be written while the gateway lived."""
    seconds = (died_ms - opening.at_ms) / 1000
    tokens_out = unseen_tokens(seconds, opening.output_limit, opening.answers)
    return Usage(
        opening.tokens_in_estimate,
        tokens_out=tokens_out,
        source="estimated",
        audio_ms=opening.audio_ms,
        characters=opening.characters,
    )
