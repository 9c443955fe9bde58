"""The model of each conversation, kept so that its prefix cache stays useful. One table per worker."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from ridgeline.gateway.routing.reading import Reading
from ridgeline.gateway.routing.routing_request import RoutingRequest

ENTRIES = 100_000  # about 30 MB; the least recently used are evicted


class StickyTable:
    """The caller gives the time: monotonic seconds."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self.entries = entries
        self._models: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._models)

    def model(self, conversation: bytes, now: float) -> str | None:
        found = self._models.get(conversation)
        if found is None:
            return None
        if found[1] <= now:
            del self._models[conversation]
            return None
        return found[0]

    def remember(self, conversation: bytes, model: str, until: float) -> None:
        self._models[conversation] = (model, until)
        self._models.move_to_end(conversation)
        if len(self._models) > self.entries:
            self._models.popitem(last=False)


def conversation_key(request: RoutingRequest, reading: Reading) -> bytes:
    """Made of the header, else of the conversation's beginning; differs between tenants and routes."""
    digest = blake2b(digest_size=16)
    named = ("id", request.conversation) if request.conversation else ("opening", *reading.opening)
    for part in (request.tenant or request.key_id, request.route, *named):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
