"""Vectors of many texts, for fit and evaluate: from an embedding server, stored in the cache folder.

Stored by the hash of the text, so that a second fit requests only new texts. No event loop, no LRU: requests
at run time go through `embedder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np

from ridgeline.gateway.routing.embedder import EmbeddingFailed, Vectors, decode
from ridgeline.options import OptionError
from ridgeline.proxy.blocking_client import BlockingClient
from ridgeline.proxy.errors import BrokenOff, Unreachable

BATCH = 64
KEY_BYTES = 16
FILE_BYTES = 1 << 30  # beyond it the file is started again

Fetch = Callable[[Sequence[str]], Vectors]
Report = Callable[[int, int], None]  # texts done, texts in all


class VectorServer:
    """`/v1/embeddings` at a URL, one request after the other."""

    def __init__(self, url: str, model: str, max_tokens: int, timeout_s: float = 120.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"--embeddings-url {url!r}: must begin with http:// or https://")
        self._client = BlockingClient(url, timeout_s=timeout_s, direct=True)
        self._model, self._max_tokens = model, max_tokens

    def fetch(self, texts: Sequence[str]) -> Vectors:
        body = msgspec.json.encode(
            {
                "model": self._model,
                "input": list(texts),
                "encoding_format": "base64",
                "truncate_prompt_tokens": self._max_tokens,
            }
        )
        try:
            answer = self._client.ask("POST", "/v1/embeddings", body)
        except (Unreachable, BrokenOff) as error:
            raise EmbeddingFailed(f"the embedding server cannot be reached: {error}") from None
        if answer.status != 200:
            said = answer.body[:200].decode("utf-8", "replace")
            raise EmbeddingFailed(f"the embedding server answered {answer.status}: {said}")
        return decode(answer.body, len(texts))


def vectors_of(texts: Sequence[str], store: Path, fetch: Callable[[], Fetch], report: Report) -> Vectors:
    """A vector for each text, from the store if present. `fetch` is called only for missing ones."""
    keys = [blake2b(text.encode("utf-8", "replace"), digest_size=KEY_BYTES).digest() for text in texts]
    known = _read(store)
    missing = list({key: text for key, text in zip(keys, texts, strict=True) if key not in known}.items())
    if missing:
        ask = fetch()
        for start in range(0, len(missing), BATCH):
            report(start, len(missing))
            batch = missing[start : start + BATCH]
            fresh = dict(zip([key for key, _ in batch], ask([text for _, text in batch]), strict=True))
            _append(store, fresh)
            known.update(fresh)
        report(len(missing), len(missing))
    return np.stack([known[key] for key in keys])


def store_path(cache: Path, model: str, max_tokens: int) -> Path:
    name = "".join(character if character.isalnum() or character in "-._" else "-" for character in model)
    return cache / "router-vectors" / f"{name}-{max_tokens}.bin"


def _read(store: Path) -> dict[bytes, Vectors]:
    """The vectors' length, then records of a key and a vector; a torn last record is ignored."""
    try:
        data = store.read_bytes()
    except FileNotFoundError:
        return {}
    if len(data) < 4 or len(data) > FILE_BYTES:
        store.unlink()
        return {}
    dimensions = int.from_bytes(data[:4], "little")
    size = KEY_BYTES + 4 * dimensions
    whole = 4 + (len(data) - 4) // size * size
    if whole < len(data):  # the next append must begin at a record boundary
        with store.open("r+b") as file:
            file.truncate(whole)
    known = {}
    for start in range(4, whole, size):
        vector = np.frombuffer(data, "<f4", dimensions, start + KEY_BYTES)
        known[data[start : start + KEY_BYTES]] = vector
    return known


def _append(store: Path, fresh: dict[bytes, Vectors]) -> None:
    store.parent.mkdir(parents=True, exist_ok=True)
    records = b"".join(key + vector.astype("<f4").tobytes() for key, vector in fresh.items())
    with store.open("ab") as file:
        if file.tell() == 0:
            records = len(next(iter(fresh.values()))).to_bytes(4, "little") + records
        file.write(records)
