"""/v1/vector_stores and file_search: the openai SDK, unmodified, and a real server with two real models.

Slow tests run all of it again on PostgreSQL and Qdrant.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ridgeline.server.vector_stores.endpoints import ENDPOINTS, FILE, ONE
from tests.conftest import LiveServer, await_ready, start_server
from tests.patience import PATIENCE_S
from tests.retrieval.real_stores import KINDS, store_flags
from tests.server.documented import assert_answer

TEA = (
    "# Tea\n\nGreen tea is not oxidised. Black tea is fully oxidised.\n\n"
    "Water for green tea should have 75 degrees Celsius.\n"
)
COFFEE = "Coffee beans are roasted at about 200 degrees Celsius. A light roast ends at the first crack.\n"
MODEL = "smollm2-135m"
Client = openai.OpenAI


@pytest.fixture(scope="module", params=KINDS)
def store_flags_here(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    with store_flags(request.param) as flags:
        yield flags


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, store_flags_here: tuple[str, ...]
) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("vector_stores")
    flags = ("--state-dir", str(folder / "state"), "--deterministic", *store_flags_here)
    started = start_server(folder / "log", *flags, models=(MODEL, "all-minilm-l6-v2"))
    try:
        await_ready(started)
        yield started
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(PATIENCE_S) == 0, started.log.read_text()
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Client:
    return openai.OpenAI(
        base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
    )


def uploaded(client: Client, name: str, content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return client.files.create(file=(name, data), purpose="assistants").id


def added(client: Client, store: str, name: str, content: str | bytes, **attributes: Any) -> str:
    file_id = uploaded(client, name, content)
    client.vector_stores.files.create(store, file_id=file_id, attributes=attributes)
    return file_id


def settled(client: Client, store: str, file_id: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        file = client.vector_stores.files.retrieve(file_id, vector_store_id=store)
        if file.status != "in_progress":
            return file
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def drinks(client: Client) -> dict[str, str]:
    """A store with two files: the ids by name."""
    store = client.vector_stores.create(name="drinks", metadata={"a": "b"}).id
    ids = {
        "store": store,
        "tea": added(client, store, "tea.md", TEA, kind="tea", year=2024),
        "coffee": added(client, store, "coffee.txt", COFFEE, kind="coffee", year=2026, hot=True),
    }
    for name in ("tea", "coffee"):
        assert settled(client, store, ids[name]).status == "completed"
    return ids


def refused(call: Any, status: int, param: str | None) -> str:
    with pytest.raises(openai.APIStatusError) as raised:
        call()
    assert (raised.value.status_code, raised.value.param) == (status, param), raised.value
    return str(raised.value)


# ── stores ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_store_is_created_listed_changed_and_deleted(client: Client) -> None:
    made = client.vector_stores.create(
        name="one", metadata={"x": "y"}, expires_after={"anchor": "last_active_at", "days": 7}
    )
    assert (made.object, made.name, made.metadata, made.status) == (
        "vector_store",
        "one",
        {"x": "y"},
        "completed",
    )
    assert made.expires_at == (made.last_active_at or 0) + 7 * 86400
    assert made.file_counts.total == 0
    changed = client.vector_stores.update(made.id, name="two", expires_after=None, metadata={"z": "1"})
    assert (changed.name, changed.expires_at, changed.metadata) == ("two", None, {"z": "1"})
    other = client.vector_stores.create()
    listed = [store.id for store in client.vector_stores.list(limit=1)]  # the SDK turns the pages
    assert listed.index(other.id) < listed.index(made.id)
    assert [one.id for one in client.vector_stores.list(order="asc", after=made.id).data] == [other.id]
    for store in (made, other):
        assert client.vector_stores.delete(store.id).deleted
        refused(lambda id=store.id: client.vector_stores.retrieve(id), 404, "vector_store_id")


def test_a_store_with_files_is_made_in_one_call(client: Client) -> None:
    file_id = uploaded(client, "tea.md", TEA)
    store = client.vector_stores.create(file_ids=[file_id])
    assert store.file_counts.total == 1
    found = client.vector_stores.search(store.id, query="Is green tea oxidised?")  # waits for the file
    assert [one.file_id for one in found] == [file_id]
    done = client.vector_stores.retrieve(store.id)
    assert (done.status, done.file_counts.completed) == ("completed", 1)
    assert done.usage_bytes > len(TEA)


def test_invalid_bodies_are_400_that_name_the_field(client: Client, drinks: dict[str, str]) -> None:
    stores, store = client.vector_stores, drinks["store"]
    refused(lambda: stores.create(file_ids=["file-none"]), 404, "file_ids[0]")
    days: Any = {"anchor": "last_active_at", "days": 0}
    refused(lambda: stores.create(expires_after=days), 400, "expires_after.days")
    refused(lambda: stores.retrieve("vs_none"), 404, "vector_store_id")
    refused(lambda: stores.search(store, query=""), 400, "query")
    refused(lambda: stores.search(store, query="x", max_num_results=51), 400, "max_num_results")
    refused(lambda: stores.search(store, query="x", rewrite_query=True), 400, "rewrite_query")
    for filters, field in (
        ({"type": "like", "key": "a", "value": "b"}, "filters.type"),
        ({"type": "and", "filters": [{"type": "gt", "key": "a", "value": "b"}]}, "filters.filters[0].value"),
    ):
        bad: Any = filters
        refused(lambda bad=bad: stores.search(store, query="x", filters=bad), 400, field)
    files = client.vector_stores.files
    refused(lambda: files.create(store, file_id="file-none"), 404, "file_id")
    sizes: Any = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51}}
    refused(
        lambda: files.create(store, file_id=drinks["tea"], chunking_strategy=sizes),
        400,
        "chunking_strategy.static.chunk_overlap_tokens",
    )
    long: Any = {"key": "x" * 513}
    refused(lambda: files.create(store, file_id=drinks["tea"], attributes=long), 400, "attributes")


def test_answers_are_what_the_openapi_document_says(server: LiveServer, drinks: dict[str, str]) -> None:
    one = f"/v1/vector_stores/{drinks['store']}"
    batch = {"file_ids": ["file-none"]}
    asked: list[tuple[str, str, str, Any]] = [
        ("GET", "/v1/vector_stores", "/v1/vector_stores", None),
        ("GET", one, ONE, None),
        ("POST", one, ONE, {"name": "drinks"}),
        ("POST", f"{one}/search", f"{ONE}/search", {"query": "tea"}),
        ("POST", f"{one}/search", f"{ONE}/search", {"query": 1}),
        ("GET", f"{one}/files", f"{ONE}/files", None),
        ("GET", f"{one}/files/{drinks['tea']}", FILE, None),
        ("GET", f"{one}/files/{drinks['tea']}/content", f"{FILE}/content", None),
        ("GET", f"{one}/files/none", FILE, None),
        ("POST", f"{one}/file_batches", f"{ONE}/file_batches", batch),
        ("DELETE", "/v1/vector_stores/none", ONE, None),
    ]
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as http:
        for method, url, path, body in asked:
            endpoint = next(one for one in ENDPOINTS if (one.method, one.path) == (method, path))
            assert_answer(endpoint, http.request(method, url, json=body))


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_has_its_text_attributes_and_strategy(client: Client, drinks: dict[str, str]) -> None:
    files, store, tea = client.vector_stores.files, drinks["store"], drinks["tea"]
    file = files.retrieve(tea, vector_store_id=store)
    assert file.attributes == {"kind": "tea", "year": 2024}
    assert file.chunking_strategy is not None
    assert file.chunking_strategy.model_dump() == {
        "type": "static",
        "static": {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400},
    }
    assert [part.text for part in files.content(tea, vector_store_id=store)] == [TEA]
    assert {one.id for one in files.list(store)} == {tea, drinks["coffee"]}
    assert files.list(store, filter="failed").data == []


def test_a_file_that_cannot_be_read_fails_alone(client: Client) -> None:
    store = client.vector_stores.create().id
    bad = added(client, store, "a.docx", b"PK\x03\x04")
    broken = added(client, store, "b.pdf", b"%PDF-1.4 nonsense")
    good = added(client, store, "c.txt", COFFEE)
    assert [settled(client, store, id).status for id in (bad, broken, good)] == [
        "failed",
        "failed",
        "completed",
    ]
    errors = [settled(client, store, id).last_error for id in (bad, broken)]
    assert [error.code for error in errors] == ["unsupported_file", "invalid_file"]
    assert "docx" in errors[0].message
    refused(lambda: client.vector_stores.files.content(bad, vector_store_id=store), 409, "file_id")


def test_attributes_can_be_changed_and_a_removed_file_is_not_found(client: Client) -> None:
    store = client.vector_stores.create().id
    one = added(client, store, "one.txt", COFFEE, lang="en")
    search = client.vector_stores.search
    french: Any = {"type": "eq", "key": "lang", "value": "fr"}
    assert search(store, query="coffee", filters=french).data == []
    client.vector_stores.files.update(one, vector_store_id=store, attributes={"lang": "fr"})
    assert [hit.file_id for hit in search(store, query="coffee", filters=french)] == [one]
    assert client.vector_stores.files.delete(one, vector_store_id=store).deleted
    assert search(store, query="coffee").data == []
    assert client.files.retrieve(one).id == one  # the upload stays
    refused(lambda: client.vector_stores.files.retrieve(one, vector_store_id=store), 404, "file_id")


def test_a_batch_makes_many_files_searchable(client: Client) -> None:
    store = client.vector_stores.create().id
    ids = [uploaded(client, f"{i}.txt", f"The secret of box {i} is number {i * 7}.") for i in range(6)]
    batches = client.vector_stores.file_batches
    batch = batches.create(
        store, files=[{"file_id": id, "attributes": {"box": i}} for i, id in enumerate(ids)]
    )
    done = batches.poll(batch.id, vector_store_id=store, poll_interval_ms=50)
    assert (done.status, done.file_counts.completed) == ("completed", 6)
    assert {file.id for file in batches.list_files(batch.id, vector_store_id=store)} == set(ids)
    third: Any = {"type": "eq", "key": "box", "value": 3}
    assert [hit.file_id for hit in client.vector_stores.search(store, query="secret", filters=third)] == [
        ids[3]
    ]
    refused(lambda: batches.cancel(batch.id, vector_store_id=store), 409, "batch_id")
    refused(lambda: batches.create(store, file_ids=[ids[0], ids[0]]), 400, "file_ids[1]")
    refused(lambda: batches.create(store), 400, "file_ids")


# ── search ───────────────────────────────────────────────────────────────────────────────────────────────


def test_results_are_ranked_filtered_and_stand_where_they_say(client: Client, drinks: dict[str, str]) -> None:
    search, store = client.vector_stores.search, drinks["store"]
    found = search(store, query="How are coffee beans roasted?").data
    assert [one.filename for one in found] == ["coffee.txt", "tea.md"]
    assert found[0].score > found[1].score
    for one, text in zip(found, (COFFEE, TEA), strict=True):
        extra: Any = one.model_extra
        assert one.content[0].text == text[extra["begin"] : extra["end"]]
    assert len(search(store, query="drink", max_num_results=1).data) == 1
    both: Any = {
        "type": "and",
        "filters": [
            {"type": "gte", "key": "year", "value": 2025},
            {"type": "eq", "key": "hot", "value": True},
        ],
    }
    assert [one.file_id for one in search(store, query="tea", filters=both)] == [drinks["coffee"]]
    several = search(store, query=["green tea", "light roast"])
    assert {one.filename for one in several} == {"tea.md", "coffee.txt"}
    assert search(store, query="tea", ranking_options={"score_threshold": 1.0}).data[0].filename == "tea.md"


def test_explain_says_what_each_leg_and_the_filter_said(client: Client, drinks: dict[str, str]) -> None:
    only_tea: Any = {"type": "eq", "key": "kind", "value": "tea"}
    page: Any = client.vector_stores.search(
        drinks["store"], query="green tea", filters=only_tea, extra_body={"explain": True}
    )
    plain = client.vector_stores.search(drinks["store"], query="green tea", filters=only_tea)
    assert [one.file_id for one in page.data] == [one.file_id for one in plain.data]
    left_out = page.left_out
    assert {one["filename"] for one in left_out} | {one.filename for one in page.data} == {
        "tea.md",
        "coffee.txt",
    }
    assert {one["explained"]["dropped"] for one in left_out} == {"excluded by the filter"}
    for one in page.data:
        legs = one.explained["legs"]
        assert [leg["name"] for leg in legs] == ["vector", "text"]
        assert all(leg["rank"] == 1 for leg in legs)


def test_two_stores_with_the_same_text_do_not_meet(client: Client, drinks: dict[str, str]) -> None:
    store = client.vector_stores.create().id
    own = added(client, store, "copy.md", TEA)
    assert {one.file_id for one in client.vector_stores.search(store, query="green tea")} == {own}
    there = {one.file_id for one in client.vector_stores.search(drinks["store"], query="green tea")}
    assert own not in there


# ── file_search ──────────────────────────────────────────────────────────────────────────────────────────


def tool(store: str, **more: Any) -> Any:
    return {"type": "file_search", "vector_store_ids": [store], **more}


def forced(text: str) -> Any:
    """An answer of these words, whatever the model thinks."""
    schema = {
        "type": "object",
        "properties": {"a": {"const": text}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}


def test_file_search_answers_with_citations_that_resolve(client: Client, drinks: dict[str, str]) -> None:
    answer = client.responses.create(
        model=MODEL,
        input="Is black tea oxidised?",
        tools=[tool(drinks["store"])],
        text=forced("Black tea is fully oxidised [2]. A light roast ends at the first crack."),
        temperature=0,
    )
    call, message = answer.output
    assert call.type == "file_search_call"
    assert (call.status, call.queries, call.results) == ("completed", ["Is black tea oxidised?"], None)
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    quotes = []
    for note in part.annotations:
        assert note.type == "file_citation"
        extra: Any = note.model_extra
        content = client.vector_stores.files.content(note.file_id, vector_store_id=extra["vector_store_id"])
        assert content.data[0].text is not None
        assert content.data[0].text[extra["begin"] : extra["end"]] == extra["quote"]
        assert 0 < note.index <= len(part.text)
        quotes.append((note.filename, extra["quote"]))
    assert quotes == [
        ("tea.md", "Black tea is fully oxidised."),
        ("coffee.txt", "A light roast ends at the first crack."),
    ]
    assert answer.usage is not None
    assert answer.usage.input_tokens > 80  # the passages were read


def test_results_are_there_when_they_are_asked_for(client: Client, drinks: dict[str, str]) -> None:
    tea: Any = {"type": "eq", "key": "kind", "value": "tea"}
    weights: Any = {"hybrid_search": {"embedding_weight": 1, "text_weight": 0}}
    answer = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "How are coffee beans roasted?"}],
        tools=[tool(drinks["store"], filters=tea, ranking_options=weights, max_num_results=3)],
        include=["file_search_call.results"],
        max_output_tokens=1,
    )
    call = answer.output[0]
    assert call.type == "file_search_call"
    assert [one.filename for one in call.results or ()] == ["tea.md"]
    assert (call.results or [])[0].text == TEA


def test_the_stream_tells_of_the_search_and_of_each_citation(client: Client, drinks: dict[str, str]) -> None:
    words = "Coffee beans are roasted at about 200 degrees Celsius [1]."
    asked: Any = {
        "model": MODEL,
        "input": "How hot is a roast?",
        "tools": [tool(drinks["store"])],
        "text": forced(words),
        "temperature": 0,
    }
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.file_search_call.in_progress",
        "response.file_search_call.searching",
        "response.file_search_call.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.annotation.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    whole = client.responses.create(**asked)
    assert last.response.output_text == whole.output_text
    notes = [one.output[1].content[0].annotations for one in (last.response, whole)]  # type: ignore[union-attr]
    assert notes[0] == notes[1]


def test_a_conversation_goes_on_after_a_search(client: Client, drinks: dict[str, str]) -> None:
    tools = [tool(drinks["store"])]
    first = client.responses.create(model=MODEL, input="What is green tea?", tools=tools, max_output_tokens=4)
    stored = client.responses.retrieve(first.id)
    assert [item.type for item in stored.output] == ["file_search_call", "message"]
    again: Any = {"model": MODEL, "tools": tools, "max_output_tokens": 4}
    second = client.responses.create(input="And black tea?", previous_response_id=first.id, **again)
    third = client.responses.create(
        input=[
            {"role": "user", "content": "What is green tea?"},
            *[item.model_dump(exclude_none=True) for item in first.output],  # type: ignore[list-item]
            {"role": "user", "content": "And black tea?"},
        ],
        **again,
    )
    assert second.usage is not None
    assert third.usage is not None
    assert second.usage.input_tokens == third.usage.input_tokens
    assert second.output[0].queries == ["And black tea?"]  # type: ignore[union-attr]
    unsearched = client.responses.create(input="Hello", tool_choice="none", **again)
    assert [item.type for item in unsearched.output] == ["message"]


def test_a_bad_tool_is_refused_by_its_field(client: Client) -> None:
    def ask(**fields: Any) -> Any:
        tools: Any = [{"type": "file_search", **fields}]
        return lambda: client.responses.create(model=MODEL, input="x", tools=tools)

    refused(ask(), 400, "tools[0].vector_store_ids")
    refused(ask(vector_store_ids=["vs_none"]), 404, "tools[0].vector_store_ids[0]")
    refused(ask(vector_store_ids=["a"], filters={"type": "x"}), 400, "tools[0].filters.type")
    refused(ask(vector_store_ids=["a"], max_num_results=0), 400, "tools[0].max_num_results")
