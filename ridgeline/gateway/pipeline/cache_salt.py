"""cache_salt: keeps tenants apart in the prefix cache of an upstream that they share.

Without a salt a tenant can find out what another has sent: `cached_tokens` and the time to the first token
reveal whether a prompt's beginning was computed before. `Forwarding` and `batch_files` call `salted` for
every request to an upstream that supports the field.
"""

from __future__ import annotations

from ridgeline.gateway.body import Fields, field, raw
from ridgeline.gateway.caching.partition import digest
from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.settings import ModelConfig
from ridgeline.gateway.upstreams.config import UpstreamConfig

FIELD = "cache_salt"
KINDS = frozenset({"chat", "completions", "responses", "messages"})  # endpoints whose prompts are cached


def takes_salt(upstream: UpstreamConfig, kind: str) -> bool:
    return upstream.takes_cache_salt and kind in KINDS


def salted(fields: Fields, given: Fields, tenant: str, model: ModelConfig) -> Fields:
    """`fields` with the tenant's salt. `given`: the client's own fields; its salt divides its tenant's cache
    further and never leaves it. A model with shared prefixes has no salt but the client's.
    """
    own = field(given, FIELD, str, "")
    if not own and bytes(given.get(FIELD, b"null")) != b"null":
        raise BadRequest(f"{FIELD}: must not be empty; leave it out", param=FIELD)
    if model.shared_prefixes and not own:
        return {name: value for name, value in fields.items() if name != FIELD}
    try:
        parts = [FIELD.encode(), tenant.encode(), own.encode()]
    except UnicodeEncodeError:
        raise BadRequest(f"{FIELD}: is not valid Unicode", param=FIELD) from None
    return {**fields, FIELD: raw(digest(parts).hex())}
