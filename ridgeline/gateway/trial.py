"""What a worker would refuse at its start, found before there is one: for `--check`, starts and reloads.

Makes parts of the settings and throws them away. Connects to nothing and starts no process.
"""

from __future__ import annotations

from ridgeline.gateway.config import GatewaySettings
from ridgeline.gateway.upstreams.credentials import read_credentials
from ridgeline.gateway.upstreams.origin import read_url
from ridgeline.web.tls import certificate


def try_upstreams(settings: GatewaySettings) -> None:
    """OptionError for addresses, certificates and keys that cannot be used."""
    for one in settings.upstreams:
        read_url(one.url, one.ca_file, f"[[upstreams]] {one.name}: url")
        read_credentials(one)


def try_certificates(settings: GatewaySettings) -> None:
    """OptionError for certificates of the gateway's own listeners that cannot be used."""
    for section, one in (("[gateway] ", settings.gateway), ("[admin] ", settings.admin)):
        certificate(one.ssl_certfile, one.ssl_keyfile, section)


def try_parts(settings: GatewaySettings) -> None:
    """All that is read at a start: also guards' patterns, routes and their artefacts, which take longer."""
    from ridgeline.gateway.guard.guards import Guards

    try_upstreams(settings)
    Guards(settings.guards)
    if not settings.routes:
        return
    from ridgeline.gateway.routing.embedder import Embedder
    from ridgeline.gateway.routing.router import ModelRouter

    embedder = Embedder(settings.embeddings, _asks_nobody) if settings.embeddings.upstream else None
    ModelRouter(settings.routes, settings.rules, embedder)


async def _asks_nobody(body: bytes) -> bytes:
    raise NotImplementedError
