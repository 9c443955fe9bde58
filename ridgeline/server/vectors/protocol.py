"""The bodies of /v1/embeddings, /v1/rerank and /v1/score as typed structs, as in `server.openai_api`."""

from __future__ import annotations

from typing import Annotated, Any

from ridgeline.server.http.body_fields import About, Body, ignored, refused
from ridgeline.server.http.common_fields import EndUserField
from ridgeline.server.http.field_types import Int, Name

MAX_TEXTS = 2048  # of one request, as OpenAI has it

_MODEL = About("a name of `/v1/models`; absent: the first served model that makes embeddings")
_TRUNCATE_TO = About(
    "cut longer texts to this number of tokens; -1: to the model's longest; absent: 400 for them"
)
_PRIORITY = About("lower is served first; default 0; from 1000 on, behind all others and without a deadline")


class VectorRequest(Body, kw_only=True, frozen=True):
    """What the three have in common."""

    model: Annotated[Name | None, _MODEL] = None
    truncate_prompt_tokens: Annotated[Int | None, _TRUNCATE_TO] = None
    priority: Annotated[Int | None, _PRIORITY] = None
    user: EndUserField = None


class EmbeddingRequest(VectorRequest, kw_only=True, frozen=True):
    input: Annotated[
        str | list[str | Int | list[Int]],
        About(
            "a text, token ids, or a list of up to 2048 of either; ids are taken as they are, special tokens "
            "included"
        ),
    ]
    encoding_format: Annotated[
        Name | None, About("`float` (default), or `base64`: little-endian float32")
    ] = None
    dimensions: Annotated[
        Int | None,
        About("keep this number of a vector's first values, and normalize; for models trained for it"),
    ] = None
    truncate: Annotated[bool | None, About("cut longer texts instead of refusing them; default false")] = None
    input_type: Annotated[Any, ignored("queries and documents are embedded alike")] = None


class RerankDocument(Body, kw_only=True, frozen=True):
    text: Annotated[str, About("the document's text")]


class RerankRequest(VectorRequest, kw_only=True, frozen=True):
    query: Annotated[str, About("what is looked for; its text must fit the model")]
    documents: Annotated[
        list[str | RerankDocument],
        About("up to 2048 texts, or objects with a `text`; what a model cannot read of them is cut"),
    ]
    top_n: Annotated[Int | None, About("how many of the best to answer with; default: all")] = None
    return_documents: Annotated[bool | None, About("answer with the texts too; default false")] = None
    max_tokens_per_doc: Annotated[Int | None, About("cut documents to this number of tokens")] = None
    max_chunks_per_doc: Annotated[Any, ignored("a document is one chunk; what does not fit is cut")] = None
    rank_fields: Annotated[Any, refused("only `text` is ranked by", ["text"])] = None
    truncation: Annotated[bool | None, ignored("documents are always cut to what the model reads")] = None


class ScoreRequest(VectorRequest, kw_only=True, frozen=True):
    text_1: Annotated[str | list[str], About("a text, or up to 2048")]
    text_2: Annotated[
        str | list[str], About("a text, or up to 2048: scored with text_1, with each, or one by one")
    ]
    encoding_format: Annotated[Any, ignored("scores are numbers")] = None
