"""VectorStoreClient: /v1/files, /v1/vector_stores and answers from files, of a server or gateway. Blocking.

For `ridgeline rag`, for evaluations, and for the adapters of LangChain and LlamaIndex. Standard library only.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ridgeline.proxy.blocking_client import BlockingClient
from ridgeline.proxy.errors import BrokenOff, Unreachable
from ridgeline.retrieval.errors import RetrievalError

TIMEOUT_S = 600.0
POLL_S = 0.1
MOST_FILES = 500  # of one batch; each is named with its attributes
PAGE = 100
IN_WORK = 8  # files that are asked for their progress

Report: TypeAlias = Callable[[float, str], None]  # files that are done, and what is in work


def _silent(done: float, work: str) -> None:
    """For callers that show no progress."""


class RequestFailed(RetrievalError):
    """The server refused a request, or could not be reached. status is 0 without an answer."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk: `text` is `[begin:end]` of the file's parsed text."""

    file_id: str
    filename: str
    score: float
    text: str
    begin: int
    end: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    explained: Mapping[str, Any] | None = None  # with explain: legs, filter, dropped


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    found: list[Found]
    left_out: list[Found]  # with explain


@dataclass(frozen=True, slots=True)
class Quote:
    """A citation: `quote` is `[begin:end]` of the file's parsed text; index: its place in the answer."""

    file_id: str
    filename: str
    store_id: str
    begin: int
    end: int
    quote: str
    index: int


@dataclass(frozen=True, slots=True)
class FileAnswer:
    text: str
    quotes: list[Quote]
    found: list[Found]
    is_complete: bool  # no file was still in progress
    usage: Mapping[str, Any]


class VectorStoreClient:
    """May be used from several threads. RequestFailed for all that does not succeed."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._client = BlockingClient(url, timeout_s=timeout_s, api_key=api_key)
        self.url = self._client.url

    # ── stores ───────────────────────────────────────────────────────────────────────────────────────────

    def stores(self) -> Iterator[dict[str, Any]]:
        """All stores, the newest first."""
        return self._pages("/v1/vector_stores", {})

    def store(self, name: str) -> dict[str, Any] | None:
        """The newest store of that name or id; None without one."""
        if name.startswith("vs_"):
            try:
                found: dict[str, Any] = self._ask("GET", f"/v1/vector_stores/{_segment(name)}")
                return found
            except RequestFailed as error:
                if error.status != 404:
                    raise
        return next(
            (one for one in self.stores() if one["name"] == name and one["status"] != "expired"), None
        )

    def create_store(self, name: str, dimensions: int | None = None) -> dict[str, Any]:
        """dimensions: how many of a vector's first numbers are kept; None: all."""
        body: dict[str, Any] = {"name": name} | ({} if dimensions is None else {"dimensions": dimensions})
        made: dict[str, Any] = self._ask("POST", "/v1/vector_stores", body)
        return made

    def delete_store(self, store_id: str) -> None:
        self._ask("DELETE", f"/v1/vector_stores/{_segment(store_id)}")

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────

    def upload(self, name: str, content: bytes) -> str:
        """Keep a file; its id."""
        boundary = secrets.token_hex(16)
        shown = name.replace("\\", "_").replace('"', "_").replace("\r", "_").replace("\n", "_")
        head = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{shown}"\r\n'
            "content-type: application/octet-stream\r\n\r\n"
        )
        body = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
        made = self._ask("POST", "/v1/files", body, content_type=f"multipart/form-data; boundary={boundary}")
        return str(made["id"])

    def delete_file(self, file_id: str) -> None:
        self._ask("DELETE", f"/v1/files/{_segment(file_id)}")

    def files(self, store_id: str) -> Iterator[dict[str, Any]]:
        return self._pages(f"/v1/vector_stores/{_segment(store_id)}/files", {})

    def add(self, store_id: str, files: Sequence[Mapping[str, Any]]) -> list[str]:
        """Make uploaded files searchable: {file_id, attributes, chunking_strategy}; ids of the batches."""
        batches = []
        for first in range(0, len(files), MOST_FILES):
            body = {"files": list(files[first : first + MOST_FILES])}
            made = self._ask("POST", f"/v1/vector_stores/{_segment(store_id)}/file_batches", body)
            batches.append(str(made["id"]))
        return batches

    def wait(self, store_id: str, batches: Sequence[str], report: Report = _silent) -> None:
        """Until all files of the batches are done, however. A store's files are done about in their order:
        the first batch that is not done is looked at.
        """
        done = 0
        for batch in batches:
            path = f"/v1/vector_stores/{_segment(store_id)}/file_batches/{batch}"
            while True:
                counts = self._ask("GET", path)["file_counts"]
                ended = done + counts["total"] - counts["in_progress"]
                if not counts["in_progress"]:
                    break
                query = {"filter": "in_progress", "order": "asc", "limit": IN_WORK}
                report(*_with_pieces(ended, self._ask("GET", f"{path}/files", query=query)["data"]))
                time.sleep(POLL_S)
            done = ended
            report(done, "")

    def wait_for(
        self, store_id: str, file_ids: Sequence[str], report: Report = _silent
    ) -> list[dict[str, Any]]:
        """Until these files are done, however; the files then."""
        ended: list[dict[str, Any]] = []
        for file_id in file_ids:
            path = f"/v1/vector_stores/{_segment(store_id)}/files/{_segment(file_id)}"
            while (file := self._ask("GET", path))["status"] == "in_progress":
                report(*_with_pieces(len(ended), [file]))
                time.sleep(POLL_S)
            ended.append(file)
            report(len(ended), "")
        return ended

    def failed(self, store_id: str, batches: Sequence[str]) -> list[dict[str, Any]]:
        """The files of the batches that could not be read, with `last_error`."""
        path = f"/v1/vector_stores/{_segment(store_id)}/file_batches"
        return [
            one for batch in batches for one in self._pages(f"{path}/{batch}/files", {"filter": "failed"})
        ]

    def remove(self, store_id: str, file_id: str) -> None:
        """Take a file out of a store."""
        self._ask("DELETE", f"/v1/vector_stores/{_segment(store_id)}/files/{_segment(file_id)}")

    def text(self, store_id: str, file_id: str) -> str:
        """A file's parsed text, which offsets refer to."""
        path = f"/v1/vector_stores/{_segment(store_id)}/files/{_segment(file_id)}/content"
        return "".join(part["text"] for part in self._ask("GET", path)["data"])

    # ── searches and answers ─────────────────────────────────────────────────────────────────────────────

    def search(
        self,
        store_id: str,
        query: str,
        *,
        k: int = 10,
        filters: Mapping[str, Any] | None = None,
        weights: tuple[float, float] | None = None,
        ranker: str | None = None,
        threshold: float | None = None,
        explain: bool = False,
    ) -> SearchAnswer:
        """weights: of vector and text search."""
        body: dict[str, Any] = {"query": query, "max_num_results": k}
        ranking = _ranking(weights, ranker, threshold)
        body |= {"ranking_options": ranking} if ranking else {}
        body |= {"filters": filters} if filters is not None else {}
        body |= {"explain": True} if explain else {}
        page = self._ask("POST", f"/v1/vector_stores/{_segment(store_id)}/search", body)
        return SearchAnswer(
            [_found(one) for one in page["data"]], [_found(one) for one in page.get("left_out", ())]
        )

    def ask(
        self,
        store_ids: Sequence[str],
        question: str,
        *,
        model: str | None = None,
        k: int = 8,
        filters: Mapping[str, Any] | None = None,
        weights: tuple[float, float] | None = None,
        ranker: str | None = None,
        max_tokens: int = 512,
        temperature: float | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> FileAnswer:
        """An answer from files, by `file_search` of /v1/responses. on_text: pieces as they arrive."""
        tool: dict[str, Any] = {
            "type": "file_search",
            "vector_store_ids": list(store_ids),
            "max_num_results": k,
        }
        ranking = _ranking(weights, ranker, None)
        tool |= {"ranking_options": ranking} if ranking else {}
        tool |= {"filters": filters} if filters is not None else {}
        body: dict[str, Any] = {
            "model": model or self.chat_model(),
            "input": question,
            "tools": [tool],
            "include": ["file_search_call.results"],
            "max_output_tokens": max_tokens,
            "stream": True,
            "store": False,
        }
        body |= {"temperature": temperature} if temperature is not None else {}
        done: dict[str, Any] | None = None
        with self._open("POST", "/v1/responses", body) as answer:
            try:
                for line in answer.lines():
                    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                        continue
                    event = json.loads(line[5:])
                    if event["type"] == "response.output_text.delta":
                        on_text(event["delta"])
                    elif event["type"] in ("response.completed", "response.incomplete"):
                        done = event["response"]
                    elif event["type"] in ("error", "response.failed"):
                        told = event.get("message") or (event.get("response") or {}).get("error") or event
                        raise RequestFailed(f"{self.url} ended the answer: {told}")
            except (BrokenOff, ValueError, KeyError) as error:
                raise RequestFailed(f"the answer of {self.url} broke off: {error!r}") from error
        if done is None:
            raise RequestFailed(f"{self.url} ended the stream early: the answer is incomplete")
        return _file_answer(done)

    def chat_model(self) -> str:
        """The first served model that is not made for embeddings, as far as the server tells."""
        models = self._ask("GET", "/v1/models")["data"]
        if not models:
            raise RequestFailed(f"{self.url} serves no model")
        return str(
            next((one["id"] for one in models if one.get("task", "generate") == "generate"), models[0]["id"])
        )

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────

    def _pages(self, path: str, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        after: dict[str, Any] = {}
        while True:
            page = self._ask("GET", path, query={"limit": PAGE, **query, **after})
            yield from page["data"]
            if not page["has_more"] or not page["data"]:
                return
            after = {"after": page["last_id"]}

    def _ask(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        with self._open(method, path, body, query, content_type) as answer:
            try:
                return json.loads(answer.read())
            except BrokenOff as error:
                raise RequestFailed(f"the connection to {self.url} was lost: {error}") from error
            except ValueError as error:
                raise RequestFailed(f"{self.url} is not a model server: it sent no JSON") from error

    def _open(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            answer = self._client.open(method, path, sent, query, content_type)
        except Unreachable as error:
            raise RequestFailed(f"cannot reach {self.url}: {error}") from error
        if answer.status == 200:
            return answer
        with answer:
            try:
                told = json.loads(answer.read(1 << 20))["error"]
                message, code = str(told["message"]), str(told.get("code") or "")
            except (ValueError, KeyError, TypeError, BrokenOff):
                message, code = "no reason given", ""
        raise RequestFailed(f"{self.url} answered {answer.status}: {message}", answer.status, code)


def _with_pieces(done: int, in_work: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Files that are done, with the finished parts of those in work; and how far the first of them is."""
    told = [(one["filename"], one["progress"]) for one in in_work if one.get("progress")]
    parts = sum(one["pieces_done"] / one["pieces_total"] for _, one in told)
    work = "".join(f"{name}: {one['pieces_done']} of {one['pieces_total']} pieces" for name, one in told[:1])
    return done + parts, work


def _ranking(
    weights: tuple[float, float] | None, ranker: str | None, threshold: float | None
) -> dict[str, Any]:
    ranking: dict[str, Any] = {}
    if weights is not None:
        ranking["hybrid_search"] = {"embedding_weight": weights[0], "text_weight": weights[1]}
    if ranker is not None:
        ranking["ranker"] = ranker
    if threshold is not None:
        ranking["score_threshold"] = threshold
    return ranking


def _found(one: Mapping[str, Any]) -> Found:
    text = one["text"] if "text" in one else "".join(part["text"] for part in one.get("content", ()))
    return Found(
        one["file_id"],
        one["filename"],
        one["score"],
        text,
        one.get("begin", 0),
        one.get("end", 0),
        one.get("attributes") or {},
        one.get("explained"),
    )


def _file_answer(response: Mapping[str, Any]) -> FileAnswer:
    text, quotes, found, is_complete = "", [], [], True
    for item in response["output"]:
        if item["type"] == "file_search_call":
            found = [_found(one) for one in item.get("results") or ()]
            is_complete = item["status"] == "completed"
        for part in item.get("content") or () if item["type"] == "message" else ():
            text += part.get("text", "")
            quotes += [
                Quote(
                    note["file_id"],
                    note["filename"],
                    note["vector_store_id"],
                    note["begin"],
                    note["end"],
                    note["quote"],
                    note["index"],
                )
                for note in part.get("annotations", ())
                if note.get("type") == "file_citation"
            ]
    return FileAnswer(text, quotes, found, is_complete, response.get("usage") or {})


def _segment(id: str) -> str:
    from urllib.parse import quote

    return quote(id, safe="")
