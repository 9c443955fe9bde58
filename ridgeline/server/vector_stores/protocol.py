"""The bodies of /v1/vector_stores as typed structs: each field with its meaning and how far it is served."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from ridgeline.retrieval.chunking.strategy import AUTO, LEAST_TOKENS, MOST_TOKENS, Kind, Strategy
from ridgeline.retrieval.ingest.records import FileStatus
from ridgeline.server.batches.bodies import Id, Metadata
from ridgeline.server.errors import BadRequest
from ridgeline.server.http.body_fields import About, Body, refused

MOST_FILES = 2000  # of one batch, as OpenAI has it
Days = Annotated[int, Meta(ge=1, le=365)]
Title = Annotated[str, Meta(max_length=256)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
Attributes = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)] | Number | bool],
    Meta(max_length=16),
]
Query = Annotated[str, Meta(min_length=1, max_length=16_384)]
Share = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(ge=0, le=1e6)]


class ChunkSizes(Body, kw_only=True, frozen=True):
    max_chunk_size_tokens: Annotated[
        int,
        About("tokens of a chunk, by the embedding model's tokenizer"),
        Meta(ge=LEAST_TOKENS, le=MOST_TOKENS),
    ]
    chunk_overlap_tokens: Annotated[
        int, About("tokens that neighbours share; at most half of a chunk"), Meta(ge=0, le=MOST_TOKENS // 2)
    ]


class AutoChunking(Body, kw_only=True, frozen=True, tag_field="type", tag="auto"):
    """800 tokens with an overlap of 400."""


class StaticChunking(Body, kw_only=True, frozen=True, tag_field="type", tag="static"):
    static: Annotated[ChunkSizes, About("sizes")]


class SentenceChunking(Body, kw_only=True, frozen=True, tag_field="type", tag="sentences"):
    static: Annotated[ChunkSizes, About("sizes; a chunk ends where a sentence does")]


class MarkdownChunking(Body, kw_only=True, frozen=True, tag_field="type", tag="markdown"):
    static: Annotated[ChunkSizes, About("sizes; a chunk stays in a section, and fences stay whole")]


class CodeChunking(Body, kw_only=True, frozen=True, tag_field="type", tag="code"):
    static: Annotated[ChunkSizes, About("sizes; a chunk ends between definitions where it can")]


Chunking = AutoChunking | StaticChunking | SentenceChunking | MarkdownChunking | CodeChunking
ChunkingField = Annotated[
    Chunking | None,
    About(
        "`auto` (800 tokens, 400 shared), `static` with sizes, or `sentences`, `markdown`, `code` with sizes"
    ),
]
_KINDS: dict[type, Kind] = {
    StaticChunking: "tokens",
    SentenceChunking: "sentences",
    MarkdownChunking: "markdown",
    CodeChunking: "code",
}


def strategy_of(asked: Chunking | None, field: str = "chunking_strategy") -> Strategy:
    if asked is None or isinstance(asked, AutoChunking):
        return AUTO
    sizes = asked.static
    if 2 * sizes.chunk_overlap_tokens > sizes.max_chunk_size_tokens:
        raise BadRequest(
            f"{field}.static.chunk_overlap_tokens",
            f"{sizes.chunk_overlap_tokens} is more than half of max_chunk_size_tokens, "
            f"{sizes.max_chunk_size_tokens}",
        )
    return Strategy(_KINDS[type(asked)], sizes.max_chunk_size_tokens, sizes.chunk_overlap_tokens)


class ExpiresAfter(Body, kw_only=True, frozen=True):
    anchor: Annotated[Literal["last_active_at"], About("the time is counted from the last use")]
    days: Annotated[Days, About("1 to 365")]


class VectorStoreRequest(Body, kw_only=True, frozen=True):
    name: Annotated[Title | None, About("for people")] = None
    description: Annotated[Annotated[str, Meta(max_length=512)] | None, About("for people")] = None
    file_ids: Annotated[
        Annotated[list[Id], Meta(max_length=500)] | None, About("uploaded files to begin with; up to 500")
    ] = None
    chunking_strategy: ChunkingField = None
    expires_after: Annotated[
        ExpiresAfter | None, About("forget the files when it was not used for so long")
    ] = None
    metadata: Annotated[Metadata | None, About("up to 16 pairs, kept with the store")] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None,
        About("keep this number of a vector's first values, and normalize; for models trained for it"),
    ] = None


class VectorStoreUpdate(Body, kw_only=True, frozen=True):
    name: Annotated[Title | UnsetType | None, About("a new name")] = UNSET
    expires_after: Annotated[ExpiresAfter | UnsetType | None, About("a new expiry; null: never")] = UNSET
    metadata: Annotated[Metadata | UnsetType | None, About("replaces all pairs")] = UNSET


class RankingOptions(Body, kw_only=True, frozen=True):
    ranker: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        About(
            "`none`, `auto`: by reciprocal rank fusion; `maxsim`, `likelihood` or the name of a served "
            "cross-encoder: that model reorders the candidates"
        ),
    ] = None
    score_threshold: Annotated[
        Share | None,
        About("leave out results whose score is below this; default 0: none is left out"),
    ] = None
    hybrid_search: Annotated[HybridSearch | None, About("weights of the two legs; default 1 and 1")] = None


class HybridSearch(Body, kw_only=True, frozen=True):
    embedding_weight: Annotated[Weight, About("of the vector search; 0: text search alone")]
    text_weight: Annotated[Weight, About("of the text search (BM25); 0: vector search alone")]


class SearchRequest(Body, kw_only=True, frozen=True):
    query: Annotated[
        Query | Annotated[list[Query], Meta(min_length=1, max_length=16)], About("a text, or up to 16, fused")
    ]
    filters: Annotated[Any, About("on attributes: eq ne gt gte lt lte in nin; and, or")] = None
    max_num_results: Annotated[
        Annotated[int, Meta(ge=1, le=50)] | None, About("most results; 1 to 50, default 10")
    ] = None
    ranking_options: Annotated[RankingOptions | None, About("how results are ranked")] = None
    rewrite_query: Annotated[
        Any, refused("queries are searched as they are; rewrite them before, or leave this out", False)
    ] = None
    explain: Annotated[
        bool | None, About("say of every candidate what each leg and the filter said; default false")
    ] = None


class StoreFileRequest(Body, kw_only=True, frozen=True):
    file_id: Annotated[Id, About("an uploaded file")]
    attributes: Annotated[Attributes | None, About("up to 16 pairs that filters see")] = None
    chunking_strategy: ChunkingField = None


class AttributesRequest(Body, kw_only=True, frozen=True):
    attributes: Annotated[Attributes | None, About("replaces all pairs; null: none")]


class FileBatchRequest(Body, kw_only=True, frozen=True):
    file_ids: Annotated[
        Annotated[list[Id], Meta(min_length=1, max_length=MOST_FILES)] | None, About("up to 2000 files")
    ] = None
    files: Annotated[
        Annotated[list[StoreFileRequest], Meta(min_length=1, max_length=MOST_FILES)] | None,
        About("instead of `file_ids`: each file with its own attributes and strategy"),
    ] = None
    attributes: Annotated[Attributes | None, About("of all files, with `file_ids`")] = None
    chunking_strategy: ChunkingField = None


class PageQuery(Body, kw_only=True, frozen=True):
    limit: Annotated[int, About("most items in the answer"), Meta(ge=1, le=100)] = 20
    order: Annotated[Literal["asc", "desc"], About("by time of creation")] = "desc"
    after: Annotated[Id | None, About("the id behind which the list goes on")] = None
    before: Annotated[Id | None, About("the id before which the list ends")] = None


class FilesQuery(PageQuery, kw_only=True, frozen=True):
    filter: Annotated[FileStatus | None, About("only files of this status")] = None
