"""The handlers of /v1/responses: create, retrieve, cancel, delete, list the input, count its tokens."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ridgeline.replica.response_ids import response_id
from ridgeline.server.answering.answer import WholeAnswer, answer
from ridgeline.server.answering.chat_job import chat_job, prompt_tokens
from ridgeline.server.answering.job import Job
from ridgeline.server.answering.running_request import RunningRequest
from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.off_loop import LONG_BYTES, off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.openai_api.logprobs import TokenNames
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.replica.feed import ReplicaFeeds
from ridgeline.server.replica.stream_request import refuse_continuation
from ridgeline.server.replica.version import ReplicaEpoch
from ridgeline.server.responses_api.background import Background, BackgroundRun, Replay
from ridgeline.server.responses_api.bodies import DeletedResponse, InputTokens, Item, ItemList
from ridgeline.server.responses_api.compaction import CompactionShape, summary_request, with_instruction
from ridgeline.server.responses_api.conversion import FieldNames, converted
from ridgeline.server.responses_api.echo import opening_body
from ridgeline.server.responses_api.file_search import file_search, tool_in
from ridgeline.server.responses_api.items import Placed, placed_items, references, salted_ids
from ridgeline.server.responses_api.namespaces import homes
from ridgeline.server.responses_api.protocol import (
    LOGPROBS,
    MAX_ITEMS,
    CompactRequest,
    InputTokensRequest,
    ItemsQuery,
    ResponseRequest,
    RetrieveQuery,
)
from ridgeline.server.responses_api.refusals import named_refusal
from ridgeline.server.responses_api.shape import ResponseShape
from ridgeline.server.responses_api.store import History, Limits, ResponseStore, not_found
from ridgeline.server.served_models import ServedModels

B = TypeVar("B", bound=InputTokensRequest)
Q = TypeVar("Q")

NO_STORE = "this server stores no responses: it has no state directory; send store: false"


class Responses:
    """State kept between requests; `store` is None if the server has no state directory."""

    def __init__(self, served_models: ServedModels) -> None:
        config = served_models.config
        limits = Limits(config.response_store_count, config.response_store_bytes, config.response_retention_s)
        self.store = (
            None
            if served_models.state is None
            else ResponseStore(served_models.state, limits, 4 * config.max_body_bytes)
        )
        self.background = Background(config)

    @classmethod
    def of(cls, request: Request) -> Responses:
        return ServedModels.of(request).part(cls)

    def stored(self, id: str) -> ResponseStore:
        """The store to look up a response; raises 404 if there is no store."""
        if self.store is None:
            raise not_found(id, None)
        return self.store


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to run: the engine's job, the answer's shape, and what to store."""

    job: Job
    shape: ResponseShape
    items: list[Placed]


async def create(request: Request) -> ASGIApp:
    served_models, context, responses = (
        ServedModels.of(request),
        RequestContext.of(request),
        Responses.of(request),
    )
    raw = await read_body(request, served_models.config)
    body = await off_loop(len(raw), lambda: _decoded(raw, ResponseRequest))
    _check(body, responses)
    if body.background:
        refuse_continuation(context, "a background response is read again by its id")
    elif tool_in(body) is not None:
        refuse_continuation(context, "the passages of its file_search are known to this server alone")
    elif LOGPROBS in (body.include or ()):
        refuse_continuation(context, "the last event has the log-probabilities of all tokens")
    ready = await _prepare(served_models, context, responses, body, len(raw))
    store = responses.store if body.store is not False else None
    feed = served_models.part(ReplicaFeeds).of(ready.job.served.model) if context.resume is not None else None
    if store is not None and feed is not None:
        feed.adopt(ready.shape.body.id)
    if store is not None and body.background:
        return await _begin(served_models, context, responses, store, ready)

    async def keep() -> None:
        if store is not None:
            await store.add(ready.shape.body, ready.items)
            if feed is not None:
                feed.stored(ready.shape.body.id)

    return answer(served_models, context, ready.job, ready.shape, keep=keep)


async def _begin(
    served_models: ServedModels,
    context: RequestContext,
    responses: Responses,
    store: ResponseStore,
    ready: Prepared,
) -> ASGIApp:
    """Start a background response: it is stored and running when its first answer is sent."""
    run = BackgroundRun(ready.shape, store, streams=ready.job.stream)
    first = encode(ready.shape.body)
    with responses.background.room_for(run):
        await store.add(ready.shape.body, ready.items)
    own = dataclasses.replace(context)  # this request ends now; the run is booked separately
    request_run = RunningRequest(served_models, own, dataclasses.replace(ready.job, stream=True))
    responses.background.start(run, request_run)
    return (
        Replay(run, 0, served_models.config)
        if run.streams
        else Response(first, media_type="application/json")
    )


async def retrieve(request: Request) -> ASGIApp:
    responses, id = Responses.of(request), request.path_params["response_id"]
    query = _query(request, RetrieveQuery)
    body = await responses.stored(id).get(id)
    if body is None:
        raise not_found(id, None)
    if not query.stream:
        if query.starting_after is not None:
            raise BadRequest("starting_after", "only allowed together with stream=true")
        return await _json(responses.background.now(body))
    run = responses.background.streamed(id)
    if run is None:
        message = "stream: this response was not created with background and stream, or its events are gone"
        raise ApiError(400, message, param="stream")
    first = 0 if query.starting_after is None else query.starting_after + 1
    return Replay(run, first, ServedModels.of(request).config)


async def cancel(request: Request) -> Response:
    responses, id = Responses.of(request), request.path_params["response_id"]
    run = responses.background.running(id)  # before reading the store: the run may end in between
    if run is not None:
        return await _json(await run.cancel())
    body = await responses.stored(id).get(id)
    if body is None:
        raise not_found(id, None)
    if not body.background:
        raise ApiError(400, f"{id} is not a background response; only those can be cancelled")
    return await _json(body)


async def delete(request: Request) -> Response:
    responses, id = Responses.of(request), request.path_params["response_id"]
    run = responses.background.running(id)
    if run is not None:
        await run.cancel()
    if not await responses.stored(id).delete(id):
        raise not_found(id, None)
    responses.background.forget(id)
    return await _json(DeletedResponse(id=id))


async def input_items(request: Request) -> Response:
    responses, id = Responses.of(request), request.path_params["response_id"]
    query = _query(request, ItemsQuery)
    store = responses.stored(id)
    page = await store.input_items(id, query.limit or 20, query.order != "asc", query.after)
    if page is None:
        if await store.get(id) is None:
            raise not_found(id, None)
        raise ApiError(404, "after: the response has no such input item", param="after", code="not_found")
    ids = [item.id for item in page.items]
    listed = ItemList(
        data=page.items,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=page.has_more,
    )
    return await _json(listed)


async def input_tokens(request: Request) -> Response:
    served_models, responses = ServedModels.of(request), Responses.of(request)
    raw = await read_body(request, served_models.config)
    body = await off_loop(len(raw), lambda: _decoded(raw, InputTokensRequest))
    items, history_bytes = await _conversation(responses, body, len(raw))
    count = await off_loop(len(raw) + history_bytes, lambda: _count(served_models, body, items))
    return await _json(InputTokens(input_tokens=count))


async def compact(request: Request) -> ASGIApp:
    served_models, context, responses = (
        ServedModels.of(request),
        RequestContext.of(request),
        Responses.of(request),
    )
    raw = await read_body(request, served_models.config)
    body = await off_loop(len(raw), lambda: _decoded(raw, CompactRequest))
    items, history_bytes = await _conversation(responses, body, len(raw))
    asked = with_instruction(items)
    job, _ = await off_loop(
        len(raw) + history_bytes, lambda: _job(served_models, summary_request(body), asked)
    )
    return WholeAnswer(RunningRequest(served_models, context, job), CompactionShape(items, context.created))


def _decoded(raw: bytes, kind: type[B]) -> B:
    try:
        return decode(raw, kind)
    except BadRequest as refusal:
        raise named_refusal(raw, refusal) from None


def _check(body: ResponseRequest, responses: Responses) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options", "only allowed together with stream: true")
    if responses.store is None and body.store:
        raise BadRequest("store", NO_STORE)
    if not body.background:
        return
    if body.store is False:
        raise BadRequest("background", "only allowed together with store: true")
    if responses.store is None:
        raise BadRequest("background", NO_STORE)
    responses.background.check_room()


async def _prepare(
    served_models: ServedModels,
    context: RequestContext,
    responses: Responses,
    body: ResponseRequest,
    size_bytes: int,
) -> Prepared:
    items, history_bytes = await _conversation(responses, body, size_bytes)
    own = [item for item in items if item.path.startswith("input")]
    is_stored = responses.store is not None and body.store is not False
    searched = await file_search(served_models, body, items)
    told, read = (body, items) if searched is None else searched.with_passages(body, items)

    def work() -> Prepared:
        job, names = _job(served_models, told, read)
        job = dataclasses.replace(job, grammar_field=names.of(job.grammar_field))
        ids = salted_ids(context.salt)
        id = response_id(ids("resp"), _epoch(served_models, context))
        first = opening_body(body, job, id, context.created, is_stored)
        names_of_tokens = TokenNames(job.client.tokenizer)
        with_logprobs = LOGPROBS in (body.include or ())
        shape = ResponseShape(first, names_of_tokens, with_logprobs, homes(body.tools), ids, searched)
        return Prepared(job, shape, own)

    return await off_loop(size_bytes + history_bytes, work)


def _epoch(served_models: ServedModels, context: RequestContext) -> str:
    """Of the server that began the answer: the id of a continued stream does not change.

    The feed tells routers that this server stores the response (`ReplicaFeed.adopt`).
    """
    if context.resume is not None and context.resume.head is not None:
        return context.resume.head.epoch
    return served_models.part(ReplicaEpoch).value


async def _conversation(
    responses: Responses, body: InputTokensRequest, size_bytes: int
) -> tuple[list[Placed], int]:
    """Earlier turns, then the input; and the approximate number of bytes from the store."""
    history, stored = History([], 0), dict[str, Item]()
    previous = body.previous_response_id
    if previous is not None:
        if responses.store is None:
            raise not_found(previous, "previous_response_id")
        history = await responses.store.history(previous)
    asked = references(body.input)
    if asked and responses.store is not None:
        stored = await responses.store.items(asked)
    own = await off_loop(size_bytes, lambda: placed_items(body.input, stored))
    if len(own) + len(history.items) > MAX_ITEMS:
        raise BadRequest("input", f"at most {MAX_ITEMS} items, earlier turns included")
    if not own and not history.items:
        raise BadRequest("input", "this field is required", "missing_field")
    return [*(Placed(item, "previous_response_id") for item in history.items), *own], history.bytes


def _job(
    served_models: ServedModels, body: InputTokensRequest, items: list[Placed]
) -> tuple[Job, FieldNames]:
    chat, names = converted(body, items)
    return names.during(lambda: chat_job(served_models, chat)), names


def _count(served_models: ServedModels, body: InputTokensRequest, items: list[Placed]) -> int:
    chat, names = converted(body, items)
    return names.during(lambda: prompt_tokens(served_models, chat))


def _query(request: Request, kind: type[Q]) -> Q:
    """The query's parameters; unknown ones are ignored, as elsewhere."""
    given = {name: value for name, value in request.query_params.items() if name in kind.__annotations__}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = re.sub(r"\W.*", "", where)
        raise BadRequest(name or None, f"{what[:1].lower()}{what[1:]}".replace("`", "")) from None


async def _json(body: Any) -> Response:
    """Encode as JSON, in a thread if it is long."""
    return Response(await off_loop(LONG_BYTES + 1, lambda: encode(body)), media_type="application/json")
