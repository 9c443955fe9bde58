"""The OpenAPI document is true: it has every route and every field, and real answers are what it says."""

from __future__ import annotations

import contextlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from ridgeline.server.app import ENDPOINTS, ROUTES
from ridgeline.server.http.body_fields import Body, fields_of
from ridgeline.server.http.endpoint import Endpoint
from ridgeline.server.http.gate import is_open
from ridgeline.server.openapi.schemas import structs_of
from ridgeline.server.records.state import StateStore
from tests.server.documented import DOCUMENT, SCHEMAS, assert_answer, endpoint_at, operation, validator
from tests.server.scripted_client import say
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage

# What an example may lack here: a model of its kind, a file that was uploaded.
ABSENT = ("model_not_found", "not_found")


async def test_the_document_is_served_and_is_openapi(stage: Stage) -> None:
    async with stage.http() as http:
        served = (await http.get("/openapi.json")).json()
    assert served == DOCUMENT
    assert served["openapi"].startswith("3.1")
    for name, schema in served["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
    identifiers = [one["operationId"] for methods in served["paths"].values() for one in methods.values()]
    assert len(identifiers) == len(set(identifiers))


def test_every_reference_leads_somewhere() -> None:
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(DOCUMENT)))
    assert references
    assert {one.rpartition("/")[2] for one in references} - set(SCHEMAS) == set()


def test_every_route_is_documented_and_the_other_way_round() -> None:
    routes = {
        (method, route.path_format)
        for route in ROUTES
        for method in (route.methods or ())
        if method != "HEAD"  # which Starlette adds to every GET
    }
    assert len(ENDPOINTS) == len({(one.method, one.path) for one in ENDPOINTS}), "one is declared twice"
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert routes == described


def test_every_endpoint_says_what_it_takes_and_gives() -> None:
    for endpoint in ENDPOINTS:
        assert endpoint.summary, endpoint.path
        assert endpoint.response is not None or endpoint.media_type != "application/json", endpoint.path
        assert endpoint.examples or endpoint.request is None, f"{endpoint.path} has no example"
        assert is_open(endpoint.path) != endpoint.needs_key, endpoint.path


def test_every_field_of_every_body_is_described() -> None:
    types = [kind for one in ENDPOINTS for kind in (one.request, one.form, one.query) if kind is not None]
    bodies = [struct for struct in structs_of(types) if issubclass(struct, Body)]
    assert len(bodies) >= 5
    for body in bodies:
        properties = _component_of(body)["properties"]
        names = {field: about.doc for field, about in fields_of(body).items()}
        assert set(properties) >= set(names), body
        assert all(names[name] in properties[name]["description"] for name in names), body


def test_a_refused_field_admits_what_is_accepted_and_nothing_else() -> None:
    for schema in SCHEMAS.values():
        for name, field in schema.get("properties", {}).items():
            if field.get("x-ridgeline-status") == "refused":
                assert validator(field).is_valid(None), name
                assert not validator(field).is_valid("surely not this"), name


def with_bodies() -> list[Endpoint]:
    return [endpoint for endpoint in ENDPOINTS if endpoint.request is not None]


@pytest.mark.parametrize("endpoint", with_bodies(), ids=lambda one: f"{one.method} {one.path}")
async def test_its_examples_are_valid_and_accepted(endpoint: Endpoint, tmp_path: Path) -> None:
    schema = operation(endpoint)["requestBody"]["content"]["application/json"]["schema"]
    state = StateStore(tmp_path)
    stage = Stage(state=state)
    for body in endpoint.examples:
        validator(schema).validate(body)
        if "{" in endpoint.path:
            continue
        response = await stage.post(endpoint.path, body)
        # A model or file that does not exist here is not an error of the body.
        assert response.status_code == 200 or _is_absence(response), response.text
        assert_answer(endpoint, response)
    state.close()


ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HELLO),
    (CHAT, {**HELLO, "n": 2, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1}),
    (CHAT, {**HELLO, "include_timing": True}),
    (CHAT, {**HELLO, "stream": True}),
    (
        CHAT,
        {
            **HELLO,
            "stream": True,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "prompt_logprobs": 1,
            "include_timing": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (COMPLETIONS, {"prompt": "a"}),
    (COMPLETIONS, {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt": "a", "stream": True, "echo": True, "logprobs": 2, "prompt_logprobs": 1}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [97]}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {**HELLO, "model": "nobody's"}),
    (COMPLETIONS, {"prompt": []}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [-1]}),
]


@pytest.mark.parametrize(("path", "body"), ASKED + REFUSED)
async def test_answers_are_what_the_document_says(path: str, body: dict[str, Any]) -> None:
    response = await Stage(say("hé!")).post(path, body)
    endpoint = endpoint_at("POST", path)
    assert (response.status_code == 200) == ((path, body) in ASKED)
    assert_answer(endpoint, response)


@pytest.mark.parametrize(
    "endpoint",
    [one for one in ENDPOINTS if one.method == "GET" and "{" not in one.path and not one.is_endless],
    ids=lambda one: one.path,
)
async def test_what_needs_no_body_answers_as_the_document_says(endpoint: Endpoint, stage: Stage) -> None:
    async with stage.http() as http:
        response = await http.get(endpoint.path)
    assert_answer(endpoint, response)


async def test_files_batches_and_responses_are_what_the_document_says_all_their_life(tmp_path: Path) -> None:
    """Every endpoint with a name in its path, asked for what there is and for what there is not."""
    with contextlib.closing(StateStore(tmp_path)) as state:
        async with Stage(state=state).http() as http:

            async def ask(method: str, path: str, asked_id: str = "", **options: Any) -> Any:
                url = re.sub(r"\{.*?\}", asked_id, path)
                response = await http.request(method, url, **options)
                assert_answer(endpoint_at(method, path), response)
                expected = (404,) if asked_id == "nobody" else (200, 409)  # a file that a batch reads stays
                assert response.status_code in expected, response.text
                return response

            line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": HELLO}
            upload = {"files": {"file": ("in.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
            file = (await ask("POST", "/v1/files", **upload)).json()["id"]
            order = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
            batch = (await ask("POST", "/v1/batches", json=order)).json()["id"]
            answer = await ask("POST", "/v1/responses", json={"input": "hi"})
            response = answer.json()["id"]
            ids = {"file_id": file, "batch_id": batch, "response_id": response, "model": "m"}
            ids["request_id"] = answer.headers["x-request-id"]
            named = sorted(
                (one for one in ENDPOINTS if "{" in one.path), key=lambda one: one.method == "DELETE"
            )
            # test_shared_files.py, test_console.py and test_vector_stores.py have the others
            elsewhere = ("sha256", "name", "path", "vector_store_id")
            named = [one for one in named if one.path_parameters[0] not in elsewhere]
            for endpoint in named:
                for asked_id in ("nobody", ids[endpoint.path_parameters[0]]):
                    if (endpoint.path, asked_id) == ("/v1/responses/{response_id}/cancel", response):
                        continue  # only what runs in the background can be cancelled
                    await ask(endpoint.method, endpoint.path, asked_id)


async def test_a_server_that_is_not_ready_answers_as_the_document_says(stage: Stage) -> None:
    stage.supervisor.reason = "not yet"
    async with stage.http() as http:
        for endpoint in ENDPOINTS:
            if "{" in endpoint.path or endpoint.form is not None or endpoint.is_endless:
                continue
            body = endpoint.examples[0] if endpoint.examples else None
            assert_answer(endpoint, await http.request(endpoint.method, endpoint.path, json=body))


async def test_the_page_lists_every_operation_and_field_and_fetches_nothing(stage: Stage) -> None:
    async with stage.http() as http:
        response = await http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = _Page()
    page.feed(response.text)
    for endpoint in ENDPOINTS:
        assert f"{endpoint.method} {endpoint.public_path}" in page.text
    for name in fields_of(next(one.request for one in ENDPOINTS if one.path == CHAT and one.request)):
        assert name in page.text
    assert page.loaded == []


class _Page(HTMLParser):
    """Collects the text, and whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.loaded: list[str] = []

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe") or "src" in dict(attributes):
            self.loaded.append(tag)


def _is_absence(response: httpx.Response) -> bool:
    error = response.json()["error"]
    return response.status_code == 404 and (isinstance(error, str) or error.get("code") in ABSENT)


def _component_of(body: type[Body]) -> dict[str, Any]:
    found: dict[str, Any] = next(
        schema
        for name, schema in SCHEMAS.items()
        if schema.get("title") == body.__name__ and set(schema.get("properties", ())) >= set(fields_of(body))
    )
    return found
