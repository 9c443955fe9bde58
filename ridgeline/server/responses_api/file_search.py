"""The `file_search` tool: searches the vector stores before the answer, with the last message of the user.

The search is not left to the model: one search for each response, whose passages stand in the prompt. So
every model can use it, and the first token waits for one search and no second pass of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ridgeline.engine.client.client import AsyncClient
from ridgeline.retrieval.answering.citations import citations
from ridgeline.retrieval.answering.passages import Passage, chosen
from ridgeline.retrieval.answering.prompt import system_text, user_text
from ridgeline.server.errors import BadRequest
from ridgeline.server.http.off_loop import LONG_BYTES, off_loop
from ridgeline.server.responses_api import bodies
from ridgeline.server.responses_api.bodies import (
    FileCitation,
    FileSearchCallItem,
    FileSearchResult,
    MessageItem,
)
from ridgeline.server.responses_api.event_writer import EventWriter
from ridgeline.server.responses_api.items import Placed
from ridgeline.server.responses_api.protocol import (
    RESULTS,
    FileSearchTool,
    InputTokensRequest,
    ResponseRequest,
    ResponseToolChoice,
)
from ridgeline.server.served_models import ServedModels
from ridgeline.server.vector_stores.protocol import RankingOptions
from ridgeline.server.vector_stores.service import VectorStores

if TYPE_CHECKING:
    from ridgeline.server.vector_stores.search import Found

DEFAULT_RESULTS = 20
LONGEST_QUERY = 16_384  # characters


@dataclass(frozen=True, slots=True)
class FileSearch:
    """A search that is done, with what its output item shows."""

    query: str
    results: list[FileSearchResult] | None  # None: not asked for
    is_complete: bool
    passages: list[Passage]

    def write(self, events: EventWriter) -> FileSearchCallItem:
        """The events of the call, and its item. It is the first of the output."""
        item = FileSearchCallItem(id=events.new_id("fs"), status="in_progress", queries=[self.query])
        at = {"output_index": 0, "item_id": item.id}
        events.write(bodies.ItemAdded, output_index=0, item=item)
        for event in (bodies.SearchInProgress, bodies.Searching, bodies.SearchCompleted):
            events.write(event, **at)
        done = msgspec.structs.replace(
            item, status="completed" if self.is_complete else "incomplete", results=self.results
        )
        events.write(bodies.ItemDone, output_index=0, item=done)
        return done

    def cite(self, text: str) -> list[FileCitation]:
        return [
            FileCitation(
                file_id=one.passage.file_id,
                filename=one.passage.filename,
                index=one.index,
                vector_store_id=one.passage.store_id,
                begin=one.begin,
                end=one.end,
                quote=one.quote,
            )
            for one in citations(text, self.passages)
        ]

    def with_passages(
        self, body: ResponseRequest, items: Sequence[Placed]
    ) -> tuple[ResponseRequest, list[Placed]]:
        """The conversation as the model reads it: the rules in the instructions, the passages with the last
        message of the user. What is stored has neither.
        """
        asked = _question(items)
        assert asked is not None
        place, question = asked
        old = items[place]
        assert isinstance(old.item, MessageItem)
        text = bodies.InputText(text=user_text(self.passages, question))
        told = msgspec.structs.replace(old.item, content=[text])
        changed = [*items[:place], Placed(told, old.path, old.is_ours), *items[place + 1 :]]
        return msgspec.structs.replace(body, instructions=system_text(body.instructions)), changed


def tool_in(body: InputTokensRequest) -> tuple[int, FileSearchTool] | None:
    """The tool and its place; two of them are refused."""
    if body.tool_choice == "none":
        return None
    found = [(i, tool) for i, tool in enumerate(body.tools or ()) if isinstance(tool, FileSearchTool)]
    if len(found) > 1:
        raise BadRequest(f"tools[{found[1][0]}]", "one file_search is enough: name all stores in it")
    if (
        not found
        and isinstance(body.tool_choice, ResponseToolChoice)
        and body.tool_choice.type == "file_search"
    ):
        raise BadRequest("tool_choice.type", "there is no file_search in tools")
    return found[0] if found else None


async def file_search(
    served_models: ServedModels, body: ResponseRequest, items: Sequence[Placed]
) -> FileSearch | None:
    """The search that the tools ask for; None without one, or without a message of the user."""
    asked, question = tool_in(body), _question(items)
    if asked is None or question is None or not question[1].strip():
        return None
    from ridgeline.server.vector_stores.search import filter_of, search  # numpy: only for searches

    place, tool = asked
    path, query = f"tools[{place}]", question[1].strip()[:LONGEST_QUERY]
    where = filter_of(tool.filters, f"{path}.filters")
    stores = await served_models.part(VectorStores).opened()
    for i, store_id in enumerate(tool.vector_store_ids):
        await stores.usable(store_id, f"{path}.vector_store_ids[{i}]")
    config = served_models.config
    results = await search(
        stores,
        list(dict.fromkeys(tool.vector_store_ids)),
        [query],
        where,
        tool.max_num_results or DEFAULT_RESULTS,
        tool.ranking_options or RankingOptions(),
        wait_s=config.retrieval_wait_s,
        field=f"{path}.ranking_options",
    )
    client = served_models.served(body.model, "generate").ready_client()
    budget = min(config.file_search_tokens, client.hello.max_context // 2)
    passages = await off_loop(LONG_BYTES + 1, lambda: _passages(results.found, budget, client))
    shown = [_result(found) for found in results.found] if RESULTS in (body.include or ()) else None
    return FileSearch(query, shown, not results.in_progress, passages)


def _passages(found: Sequence[Found], budget: int, client: AsyncClient) -> list[Passage]:
    parts = [
        Passage(
            one.store_id,
            one.hit.chunk.document_id,
            one.filename,
            one.hit.chunk.begin,
            one.hit.chunk.end,
            one.hit.chunk.text,
        )
        for one in found
    ]
    return chosen(parts, budget, lambda text: client.tokenizer.encode_starts(text)[1])


def _result(found: Found) -> FileSearchResult:
    chunk = found.hit.chunk
    return FileSearchResult(
        file_id=chunk.document_id,
        filename=found.filename,
        score=found.hit.score,
        attributes=dict(chunk.attributes),
        text=chunk.text,
        vector_store_id=found.store_id,
        begin=chunk.begin,
        end=chunk.end,
    )


def _question(items: Sequence[Placed]) -> tuple[int, str] | None:
    """The last message of the user, and its place."""
    for place in range(len(items) - 1, -1, -1):
        item = items[place].item
        if isinstance(item, MessageItem) and item.role == "user":
            return place, "\n".join(part.text for part in item.content)
    return None
