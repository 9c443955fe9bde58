"""OwnEmbeddings: the gateway's own requests for vectors, for the router and the semantic cache.

A hosted upstream bills them, so each has a row: key `gateway`, endpoint `embeddings`.
"""

from __future__ import annotations

import secrets
import time

from ridgeline.gateway.accounting.ledger import Ledger
from ridgeline.gateway.accounting.prices import Prices
from ridgeline.gateway.accounting.row import LedgerRow, Opening
from ridgeline.gateway.accounting.token_formula import prompt_tokens
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import read_fields
from ridgeline.gateway.dialects.counts import usage_of
from ridgeline.gateway.routing.config import EmbeddingsConfig
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.gateway.upstreams.upstreams import Upstreams

KEY = "gateway"
MOST_BYTES = 16 << 20  # of an answer
LONGEST_S = 5.0


class OwnEmbeddings:
    def __init__(
        self, config: EmbeddingsConfig, upstreams: Upstreams, ledger: Ledger, prices: Prices, is_hosted: bool
    ) -> None:
        self._target = Target(config.upstream, config.model)
        self._upstreams, self._ledger, self._prices = upstreams, ledger, prices
        self._is_hosted = is_hosted

    async def post(self, body: bytes) -> bytes:
        """The answer to a body of /v1/embeddings, or a GatewayError."""
        if not self._is_hosted:
            return await self._fetch(body)
        target, tokens = self._target, prompt_tokens(read_fields(body))
        row = LedgerRow(f"req_{secrets.token_hex(12)}", int(time.time() * 1000), KEY, endpoint="embeddings")
        row.model_asked = row.model = row.upstream_model = target.model
        row.upstream, row.attempts = target.upstream, 1
        asked = (KEY, "", row.endpoint, target.model, target.model, target.upstream, target.model, False)
        self._ledger.open(Opening(row.request_id, row.at_ms, *asked, tokens))
        usage = Usage(tokens, source="estimated")
        row.outcome, row.error_code = "upstream_failed", "no_vectors"
        try:
            answer = await self._fetch(body)
            usage = usage_of("embeddings", "openai", answer) or usage
            row.outcome, row.error_code, row.status = "ok", "", 200
            return answer
        finally:
            self._close(row, usage)

    async def _fetch(self, body: bytes) -> bytes:
        headers = [(b"content-type", b"application/json")]
        outgoing = Outgoing("POST", "/v1/embeddings", headers, body, False)
        return await self._upstreams.fetch(
            self._target, outgoing, limit=MOST_BYTES, within_s=LONGEST_S, priority=0
        )

    def _close(self, row: LedgerRow, usage: Usage) -> None:
        row.tokens_in, row.usage_source = usage.tokens_in, usage.source
        row.cost_pusd, row.price_source = self._prices.cost(
            row.model, row.upstream, row.upstream_model, usage
        )
        self._ledger.close(row)
