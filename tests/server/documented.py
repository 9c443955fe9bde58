"""The OpenAPI document as tests use it: is this answer one that the document has for this endpoint?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
from jsonschema import Draft202012Validator

from ridgeline.server.app import ENDPOINTS
from ridgeline.server.http.endpoint import Endpoint
from ridgeline.server.openapi.document import document
from tests.server.events import events

DOCUMENT = json.loads(json.dumps(document(ENDPOINTS)))
SCHEMAS = DOCUMENT["components"]["schemas"]


def operation(endpoint: Endpoint) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][endpoint.public_path][endpoint.method.lower()]
    return found


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    """References stay within the document."""
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def assert_is(answer: Any, schema: dict[str, Any]) -> None:
    """Every field of the answer is described, and every description holds."""
    error = jsonschema.exceptions.best_match(validator(_closed(schema)).iter_errors(answer))
    assert error is None, f"{error.json_path}: {error.message}"


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """For the test alone: a field that is not described is an error."""
    closed = json.loads(json.dumps({**schema, "components": DOCUMENT["components"]}))
    for one in closed["components"]["schemas"].values():
        if "properties" in one:
            one.setdefault("additionalProperties", False)
    return closed


def endpoint_at(method: str, path: str) -> Endpoint:
    return next(one for one in ENDPOINTS if (one.method, one.path) == (method, path))


def assert_answer(endpoint: Endpoint, response: httpx.Response) -> None:
    """This status, this content type and this body are in the document for this endpoint."""
    described = operation(endpoint)["responses"]
    status = str(response.status_code)
    assert status in described, f"{endpoint.path} answered {status}: {response.text[:200]}"
    kind = response.headers["content-type"].partition(";")[0]
    content = described[status]["content"]
    assert kind in content, f"{kind} is not among {list(content)}"
    if kind == "application/json":
        assert_is(response.json(), content[kind]["schema"])
    elif kind == "text/event-stream":
        for event in _events(response.text):
            assert_is(event, content[kind]["x-event-data"])
    elif "x-line-data" in content[kind]:
        for line in response.text.splitlines():
            assert_is(json.loads(line), content[kind]["x-line-data"])


def _events(text: str) -> Iterator[dict[str, Any]]:
    named = re.sub(r"^event: .*\n", "", text, flags=re.MULTILINE)
    return (event for event in events(named) if isinstance(event, dict))


ABSENT = ("model_not_found", "not_found")  # a model, or a file that a batch is to read
