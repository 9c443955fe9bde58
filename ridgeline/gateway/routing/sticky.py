"""Conversations and the model each stays on, so that its prefix cache is of use. One table per worker."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from ridgeline.gateway.routing.question import Question
from ridgeline.gateway.routing.reading import Reading

ENTRIES = 100_000  # some 30 MB; the least recently used go first


class StickyTable:
    """Time is the caller's: monotonic seconds."""

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


def conversation_key(question: Question, reading: Reading) -> bytes:
    """Of the header, else of what the conversation began with; never the same for two tenants or routes."""
    digest = blake2b(digest_size=16)
    named = ("id", question.conversation) if question.conversation else ("opening", *reading.opening)
    for part in (question.tenant or question.key_id, question.route, *named):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
