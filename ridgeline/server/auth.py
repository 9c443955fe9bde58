"""Bearer keys: which paths need one, and a comparison whose time tells nothing about them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from ridgeline.server.errors import INVALID, ApiError

# Probes and scrapers carry no keys, and learn nothing of anybody's text.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class KeyRing:
    """The accepted keys, kept as digests: all are of one length, so a comparison cannot tell lengths."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, path: str, headers: Headers) -> None:
        """Raises 401 unless the path is open, no keys are set, or the request carries one of them."""
        if not self._digests or path in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("no API key was given; send the header Authorization: Bearer <key>")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        known = False
        for accepted in self._digests:  # every key is compared, so that the time does not tell which matched
            known |= hmac.compare_digest(digest, accepted)
        if not known:
            raise _unauthorized("this API key is not accepted here")


def _unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, type=INVALID, code="invalid_api_key", headers=headers)
