"""Ways for the embedder to reach a server: one of the gateway's upstreams, or a URL (for benchmarks)."""

from __future__ import annotations

from time import monotonic

from ridgeline.gateway.errors import UpstreamFailed
from ridgeline.gateway.routing.config import EmbeddingsConfig
from ridgeline.gateway.routing.embedder import Post
from ridgeline.gateway.upstreams.http_client import Deadlines, HttpClient
from ridgeline.gateway.upstreams.origin import read_url
from ridgeline.gateway.upstreams.outgoing import Headers, Outgoing, Target
from ridgeline.gateway.upstreams.upstreams import Upstreams

PATH = "/v1/embeddings"
HEADERS: Headers = [(b"content-type", b"application/json")]
ANSWER_BYTES = 64 << 20
TENANT = "gateway:embeddings"  # beside the tenants in an upstream's queue; no key has such an id


def upstream_post(upstreams: Upstreams, config: EmbeddingsConfig) -> Post:
    """Through the upstream's credentials, breaker and queue, in front of what clients ask of it."""
    target = Target(config.upstream, config.model)

    async def post(body: bytes) -> bytes:
        outgoing = Outgoing("POST", PATH, HEADERS, body, stream=False)
        deadline = monotonic() + config.timeout_ms / 1e3
        opened = await upstreams.open(
            [target], lambda _: outgoing, tenant=TENANT, priority=0, deadline=deadline
        )
        is_whole = False
        try:
            answer = await opened.answer.read(ANSWER_BYTES)
            is_whole = opened.answer.status == 200
        finally:
            if is_whole:
                opened.close(True)
            else:
                opened.abort()
        if not is_whole:
            raise UpstreamFailed("the embedding server refused")
        return answer

    return post


def url_post(client: HttpClient, url: str, config: EmbeddingsConfig) -> Post:
    """Straight to a server that asks for no key."""
    origin = read_url(url)
    deadlines = Deadlines()

    async def post(body: bytes) -> bytes:
        until = monotonic() + config.timeout_ms / 1e3
        answer = await client.ask(origin, "POST", PATH, HEADERS, body, deadlines=deadlines, until=until)
        found = await answer.read(ANSWER_BYTES)
        if answer.status != 200:
            raise UpstreamFailed("the embedding server refused")
        return found

    return post
