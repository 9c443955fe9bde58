"""The endpoints of /v1/responses, for `server.app` and the OpenAPI document."""

from __future__ import annotations

from ridgeline.server.http.endpoint import Endpoint, Generating
from ridgeline.server.responses_api import handlers
from ridgeline.server.responses_api.bodies import (
    CompactedResponse,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseBody,
    ResponseEvent,
)
from ridgeline.server.responses_api.protocol import (
    CompactRequest,
    InputTokensRequest,
    ItemsQuery,
    ResponseRequest,
    RetrieveQuery,
)

EXAMPLE = {"input": "What is the capital of France?", "max_output_tokens": 20, "store": False}
ONE = "/v1/responses/{response_id}"

ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/responses",
        Generating(handlers.create),
        "A response to text or items, whole, streamed or in the background; stored unless told not to",
        request=ResponseRequest,
        response=ResponseBody,
        events=ResponseEvent,
        examples=(EXAMPLE, {**EXAMPLE, "stream": True, "instructions": "Answer in one word."}),
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        handlers.input_tokens,
        "How many tokens a response's input has",
        request=InputTokensRequest,
        response=InputTokens,
        examples=({"input": "What is the capital of France?"},),
    ),
    Endpoint(
        "POST",
        "/v1/responses/compact",
        Generating(handlers.compact),
        "A conversation, shortened: the user's messages, and a summary of all that was said",
        request=CompactRequest,
        response=CompactedResponse,
        errors=(429, 504),
        examples=({"input": [{"role": "user", "content": "What is the capital of France?"}]},),
    ),
    Endpoint(
        "GET",
        ONE,
        Generating(handlers.retrieve),
        "A stored response as it is now, or the events of one that runs in the background",
        query=RetrieveQuery,
        response=ResponseBody,
        events=ResponseEvent,
    ),
    Endpoint("DELETE", ONE, handlers.delete, "Forget a stored response", response=DeletedResponse),
    Endpoint(
        "POST",
        ONE + "/cancel",
        handlers.cancel,
        "End a background response; one that has ended stays as it is",
        response=ResponseBody,
    ),
    Endpoint(
        "GET",
        ONE + "/input_items",
        handlers.input_items,
        "The input of a stored response, in pages",
        query=ItemsQuery,
        response=ItemList,
    ),
]
