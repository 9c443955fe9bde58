"""schemathesis reads our OpenAPI document and asks whatever the document allows, and what it does not: never
a 5xx, never a hang, and every answer is what the document says.

Examples per operation are few in CI; `make test-slow` runs many more.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ridgeline.server.app import ENDPOINTS
from ridgeline.server.http.endpoint import Endpoint
from ridgeline.server.openapi.document import document
from ridgeline.server.records.state import StateStore
from tests.patience import PATIENCE_S
from tests.server.stage import Stage

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
FEW, MANY = 12, 400
ENDING = [endpoint for endpoint in ENDPOINTS if not endpoint.is_endless]
HANGS_S = PATIENCE_S


@dataclass(frozen=True)
class Served:
    base_url: str
    schema: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The scripted stage behind a real socket, on its own event loop: schemathesis is synchronous."""
    with _stage_in_a_thread(tmp_path_factory.mktemp("state")) as base_url:
        schema = schemathesis.openapi.from_dict(_with_our_model(document(ENDPOINTS)))
        schema.config.update(base_url=base_url)
        yield Served(base_url, schema)


def _with_our_model(described: dict[str, Any]) -> dict[str, Any]:
    """Any other model's name is a 404, and nothing behind that would be reached."""
    for schema in described["components"]["schemas"].values():
        if "additionalProperties" in schema and "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": ["m", None]}
    return described


@contextlib.contextmanager
def _stage_in_a_thread(folder: Path) -> Iterator[str]:
    addresses: list[str] = []
    ready, finished = threading.Event(), threading.Event()

    async def serve() -> None:
        state = StateStore(folder)
        async with Stage(state=state).served() as http:
            addresses.append(str(http.base_url).rstrip("/"))
            ready.set()
            await asyncio.to_thread(finished.wait)
        state.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield addresses[0]
    finally:
        finished.set()
        thread.join(PATIENCE_S)


def _ask_many(served: Served, endpoint: Endpoint, examples: int) -> None:
    operation = served.schema[endpoint.public_path][endpoint.method]
    statuses: Counter[int] = Counter()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        if mode == GenerationMode.NEGATIVE and not (endpoint.request or endpoint.form or endpoint.query):
            continue

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            response = case.call(base_url=served.base_url, timeout=HANGS_S)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        ask()
    print(f"\n{_name(endpoint)}: {dict(statuses)}")


def _name(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


@pytest.mark.parametrize("endpoint", ENDING, ids=_name)
def test_whatever_is_asked_the_answer_is_no_5xx_and_as_documented(served: Served, endpoint: Endpoint) -> None:
    _ask_many(served, endpoint, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ENDING, ids=_name)
def test_the_same_at_length(served: Served, endpoint: Endpoint) -> None:
    _ask_many(served, endpoint, MANY)
