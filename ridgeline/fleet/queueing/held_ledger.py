"""HeldLedger: the state that a journal's records describe: waiting requests, and answers not fetched yet.

Pure: the same records in the same order give the same state, whether they are made now or read after a crash.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec


class HeldRequest(msgspec.Struct, frozen=True, tag="held"):
    """A request that waits for the first replica. The client sends `key` again to get the answer."""

    id: str
    number: int  # order of arrival, also across restarts
    key: str
    model: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    tenant: str = ""
    priority: int = 1
    arrived_at: float = 0.0  # wall clock, for display


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    id: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The request is done: its answer was fetched or expired, or its client cancelled it."""

    id: str
    why: str


Record = HeldRequest | Answer | Dropped
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class KeyReused(Exception):
    """The key belongs to another request."""


class HeldLedger:
    """waiting: requests in order of arrival. answers: those that were not fetched yet."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, HeldRequest] = OrderedDict()
        self.answers: OrderedDict[str, Answer] = OrderedDict()
        self._ids: dict[tuple[str, str], str] = {}  # (tenant, key) → id
        self._requests: dict[str, tuple[str, str, bytes]] = {}  # id → tenant, key, fingerprint
        self.next_number = 0

    def apply(self, record: Record) -> None:
        if isinstance(record, HeldRequest):
            self.waiting[record.id] = record
            self._ids[record.tenant, record.key] = record.id
            self._requests[record.id] = (record.tenant, record.key, fingerprint(record.path, record.body))
            self.next_number = max(self.next_number, record.number + 1)
        elif isinstance(record, Answer):
            if record.id in self._requests:
                self.waiting.pop(record.id, None)
                self.answers[record.id] = record
        elif record.id in self._requests:
            tenant, key, _ = self._requests.pop(record.id)
            self._ids.pop((tenant, key), None)
            self.waiting.pop(record.id, None)
            self.answers.pop(record.id, None)

    def find(self, tenant: str, key: str, path: str, body: bytes) -> str | None:
        """The id of this request, if it was sent before with this key. KeyReused if the key has another."""
        id = self._ids.get((tenant, key))
        if id is not None and self._requests[id][2] != fingerprint(path, body):
            raise KeyReused(f"key {key!r} belongs to another request: use a new key for each request")
        return id

    def id_of(self, tenant: str, name: str) -> str | None:
        """name: an id of one of the tenant's requests, or its key."""
        return name if self.tenant_of(name) == tenant else self._ids.get((tenant, name))

    def tenant_of(self, id: str) -> str | None:
        """None if there is no such request."""
        found = self._requests.get(id)
        return None if found is None else found[0]

    def bytes_of(self, id: str) -> int:
        """Bytes of the body, which the request's next record makes obsolete."""
        kept = self.waiting.get(id) or self.answers.get(id)
        return len(kept.body) if kept is not None else 0

    def records(self) -> list[Record]:
        """The shortest journal with the same state. An answered request keeps its key, without its body."""
        answered: list[Record] = []
        for id, answer in self.answers.items():
            answered += [self._marker(id), answer]
        return [*answered, *self.waiting.values()]

    def _marker(self, id: str) -> HeldRequest:
        tenant, key, print_of = self._requests[id]
        return HeldRequest(id, -1, key, "", "", print_of, (), tenant)


def fingerprint(path: str, body: bytes) -> bytes:
    """The fingerprint of a request. A record without a path has no body, but the fingerprint itself."""
    return body if not path else hashlib.sha256(path.encode() + b"\0" + body).digest()


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    return _decoder.decode(data)
