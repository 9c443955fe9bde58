"""Finds settings that a worker would refuse, before one starts: for `--check`, starts and reloads.

Makes a worker's parts from the settings and discards them. It starts only the NER processes of guards:
stores and upstreams may be unreachable while a file is checked.
"""

from __future__ import annotations

import asyncio

from ridgeline.gateway.settings import GatewaySettings
from ridgeline.gateway.upstreams.credentials import read_credentials
from ridgeline.proxy.origin import read_url
from ridgeline.web.tls import certificate


def try_upstreams(settings: GatewaySettings) -> None:
    """OptionError for addresses, certificates and keys that cannot be used."""
    for one in settings.upstreams:
        read_url(one.address, one.ca_file, f"[[upstreams]] {one.name}: url")
        read_credentials(one)


def try_certificates(settings: GatewaySettings) -> None:
    """OptionError for certificates of the gateway's own listeners that cannot be used."""
    for section, one in (("[gateway] ", settings.gateway), ("[admin] ", settings.admin)):
        certificate(one.ssl_certfile, one.ssl_keyfile, section)


def try_parts(settings: GatewaySettings) -> None:
    """Load everything that a start loads: also guards with their NER models, prices, routes and artifacts."""
    from ridgeline.gateway.accounting.prices import Prices
    from ridgeline.gateway.catalog import Catalog

    try_upstreams(settings)
    Catalog(settings)
    Prices(settings.models, settings.upstreams, settings.prices)
    asyncio.run(_try_guards(settings))
    embedder = None
    if settings.embeddings.upstream:
        from ridgeline.gateway.caching.semantic import SemanticCache
        from ridgeline.gateway.routing.embedder import Embedder

        embedder = Embedder(settings.embeddings, _asks_nobody)
        SemanticCache(settings.cache, embedder)
    if settings.routes:
        from ridgeline.gateway.routing.router import ModelRouter

        ModelRouter(settings.routes, settings.rules, embedder)


async def _try_guards(settings: GatewaySettings) -> None:
    from ridgeline.gateway.guard.guards import Guards

    guards = Guards(settings.guards)
    try:
        await guards.start()
    finally:
        await guards.close()


async def _asks_nobody(body: bytes) -> bytes:
    raise NotImplementedError
