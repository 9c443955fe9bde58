"""A chunk as the payload of a Qdrant point, and back. Pure."""

from __future__ import annotations

import base64

import numpy as np

from ridgeline.retrieval.lexical.terms import packed_text
from ridgeline.retrieval.stores.index import IndexRow
from ridgeline.retrieval.stores.qdrant_api import Point
from ridgeline.retrieval.stores.qdrant_filters import payload_of
from ridgeline.retrieval.types import Attributes, Chunk


def payload_of_chunk(chunk: Chunk, number: int, attributes: Attributes) -> dict[str, object]:
    return {
        "id": chunk.id,
        "document": chunk.document_id,
        "number": number,
        "ordinal": chunk.ordinal,
        "begin": chunk.begin,
        "end": chunk.end,
        "text": chunk.text,
        "terms": base64.b64encode(packed_text(chunk.text)).decode(),
        "attributes": dict(attributes),
        "a": payload_of(attributes),
    }


def chunk_of(point: Point, vectors: bool) -> Chunk:
    one = point["payload"]
    vector = np.array(point["vector"], np.float32) if vectors else None
    return Chunk(
        one["id"],
        one["document"],
        one["ordinal"],
        one["begin"],
        one["end"],
        one["text"],
        one["attributes"],
        vector,
    )


def index_row_of(one: Point) -> IndexRow:
    return IndexRow(one["number"], one["id"], one["document"], base64.b64decode(one["terms"]), None)
