"""The OpenAPI 3.1 document: the endpoints with the schemas of their bodies. Built on the first request."""

from __future__ import annotations

import http
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

import ridgeline
from ridgeline.server.http.body_fields import About
from ridgeline.server.http.endpoint import JSON, NDJSON, Endpoint
from ridgeline.server.openapi.schemas import Schema, Schemas

DESCRIPTION = (
    "Request bodies have a closed set of fields: an unknown one is refused with its name. A field marked "
    "`refused` is known and not served, and accepts only the values listed; one marked `ignored` changes "
    "nothing. `null` always means the default."
)
STREAM = "one server-sent event, of those that come if the body says `stream: true`"
RETRIED = (429, 503)  # statuses with a retry-after header
NOT_JSON: Schema = {"type": "string"}
SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole document, ready to be encoded to JSON."""
    schemas = Schemas(kind for endpoint in endpoints for kind in _types_of(endpoint))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operations = paths.setdefault(endpoint.public_path, {})
        operations[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ridgeline", "version": ridgeline.__version__, "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _types_of(endpoint: Endpoint) -> list[Any]:
    found = [endpoint.request, endpoint.form, endpoint.query, endpoint.response]
    found += [endpoint.events, endpoint.lines]
    return [kind for kind in (*found, endpoint.error, *endpoint.answers.values()) if kind is not None]


def _operation(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        # The empty alternative: the operator decides whether keys are required.
        "security": [{}, *SECURITY] if endpoint.needs_key else [],
        "responses": {"200": _success(endpoint, schemas)},
    }
    parameters = [_path_parameter(name) for name in endpoint.path_parameters]
    if endpoint.query is not None:
        parameters += _query_parameters(endpoint.query, schemas)
    if parameters:
        operation["parameters"] = parameters
    body = _request_body(endpoint, schemas)
    if body is not None:
        operation["requestBody"] = body
    for status in endpoint.statuses():
        shape = endpoint.answers.get(status, endpoint.error)
        operation["responses"][str(status)] = _failure(status, schemas.of(shape))
    return operation


def _operation_id(endpoint: Endpoint) -> str:
    words = endpoint.public_path.replace("{", "").replace("}", "").replace(".", "_").strip("/")
    return f"{endpoint.method.lower()}_{words.replace('/', '_')}"


def _request_body(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any] | None:
    if endpoint.form is not None:
        return {"required": True, "content": {"multipart/form-data": {"schema": schemas.of(endpoint.form)}}}
    if endpoint.request is None:
        return None
    content: dict[str, Any] = {"schema": schemas.of(endpoint.request)}
    if endpoint.examples:
        content["examples"] = {
            f"example-{i}": {"value": body} for i, body in enumerate(endpoint.examples, start=1)
        }
    return {"required": True, "content": {JSON: content}}


def _success(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    schema = NOT_JSON if endpoint.response is None else schemas.of(endpoint.response)
    content: dict[str, Any] = {endpoint.media_type: {"schema": schema}}
    if endpoint.events is not None:
        data = schemas.of(endpoint.events)
        content["text/event-stream"] = {"schema": _event(data), "x-event-data": data}
    if endpoint.lines is not None:
        content[NDJSON] = {"schema": NOT_JSON, "x-line-data": schemas.of(endpoint.lines)}
    return {"description": "OK", "headers": _headers(200), "content": content}


def _event(data: Schema) -> Schema:
    """One event, as OpenAPI 3.2 describes it; chat and completions end with one whose data is [DONE]."""
    told = {"anyOf": [{"const": "[DONE]"}, {**NOT_JSON, "contentMediaType": JSON, "contentSchema": data}]}
    return {
        "type": "object",
        "description": STREAM,
        "properties": {"event": NOT_JSON, "data": told},
        "required": ["data"],
    }


def _failure(status: int, schema: Schema) -> dict[str, Any]:
    return {
        "description": http.HTTPStatus(status).phrase,
        "headers": _headers(status),
        "content": {JSON: {"schema": schema}},
    }


def _headers(status: int) -> dict[str, Any]:
    headers = {"x-request-id": {"description": "the client's own, or a new one", "schema": NOT_JSON}}
    if status in RETRIED:
        headers["retry-after"] = {"description": "seconds", "schema": {"type": "string", "pattern": r"^\d+$"}}
    return headers


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query_parameters(query: type[msgspec.Struct], schemas: Schemas) -> list[dict[str, Any]]:
    """Every parameter is optional; a query cannot express null."""
    component = schemas.components[schemas.of(query)["$ref"].rpartition("/")[2]]
    hints = typing.get_type_hints(query, include_extras=True)
    found = []
    for name, schema in component["properties"].items():
        about = next((part for part in typing.get_args(hints[name]) if isinstance(part, About)), None)
        described = {"description": about.doc} if about else {}
        required = name in component.get("required", ())
        found.append(
            {"name": name, "in": "query", "required": required, **described, "schema": _written(schema)}
        )
    return found


def _written(schema: Schema) -> Schema:
    kept = {key: value for key, value in schema.items() if key not in ("default", "description")}
    choices = [choice for choice in kept.get("anyOf", ()) if choice != {"type": "null"}]
    return choices[0] if len(choices) == 1 else kept
