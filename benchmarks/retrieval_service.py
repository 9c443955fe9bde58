"""What retrieval costs a server: the time until 1 MB of text is searchable, and what a search adds to TTFT.

    python benchmarks/retrieval_service.py [--chunks 100000] [--rounds 10] [--state FOLDER]

Starts `ridgeline serve smollm2-135m all-minilm-l6-v2` over a prepared state directory with a vector store of
--chunks chunks. Plain answers and answers with file_search are interleaved and read the same passages: the
difference is the search. Bars: 1 MB in 3 s, 15 ms at 100,000 chunks, every citation resolves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from openai import OpenAI

from ridgeline.retrieval.answering.prompt import system_text
from ridgeline.retrieval.ingest.catalog import Catalog
from ridgeline.retrieval.ingest.records import StoreFile, VectorStoreRow
from ridgeline.retrieval.stores.sqlite import SqliteStore
from ridgeline.retrieval.types import Chunk, Document, Namespace, NamespaceSpec
from ridgeline.storage.sqlite import SqliteDatabase

CHAT, EMBED, DIMENSIONS = "smollm2-135m", "all-minilm-l6-v2", 384
STORE = "vs_prepared"
WORDS = Path(__file__).resolve().parents[1].joinpath("docs", "http-api.md").read_text("utf-8").split()
PER_FILE = 1000  # chunks


def text_of(seed: int, words: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words)) + ". "


async def prepare(folder: Path, chunks: int) -> None:
    """A vector store of random vectors, as a server would have written it."""
    folder.mkdir(parents=True)
    catalog = Catalog(SqliteDatabase(folder / "catalog.sqlite", 60.0))
    store = SqliteStore(folder / "chunks.sqlite", 60.0)
    await catalog.open()
    await store.open()
    now = catalog.now()
    await catalog.add_store(VectorStoreRow(id=STORE, name="prepared", created_at=now, active_at=now))
    namespace, random_numbers = Namespace("", STORE), np.random.default_rng(0)
    await store.create(namespace, NamespaceSpec(DIMENSIONS, EMBED))
    for number in range(0, chunks, PER_FILE):
        count, name = min(PER_FILE, chunks - number), f"file-{number}"
        texts = [text_of(number + i, 40) for i in range(count)]
        places = np.cumsum([0, *map(len, texts)])
        vectors = random_numbers.standard_normal((count, DIMENSIONS)).astype(np.float32)
        rows = [
            Chunk(f"{name}:{i}", name, i, int(places[i]), int(places[i + 1]), text, vector=vector)
            for i, (text, vector) in enumerate(zip(texts, vectors, strict=True))
        ]
        await store.put(namespace, Document(name, f"{name}.txt", "".join(texts)), rows)
        file = StoreFile(store_id=STORE, file_id=name, filename=f"{name}.txt", created_at=now)
        (added,) = await catalog.add_files([file])
        await catalog.complete(added, count, 0)
    await catalog.close()
    await store.close()


def started(state: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    command = [sys.executable, "-m", "ridgeline.cli.main", "serve", CHAT, EMBED, "--port", "0"]
    with log.open("wb") as out:
        options = ["--state-dir", str(state), "--log-format", "json"]
        process = subprocess.Popen([*command, *options], stdout=out, stderr=subprocess.STDOUT)
    while process.poll() is None:
        for line in log.read_text("utf-8").splitlines():
            if line.startswith("{") and (said := json.loads(line)).get("message") == "serving":
                return process, said["url"]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text('utf-8')}")


def ingest_s(client: OpenAI, seed: int) -> float:
    """Seconds from an upload of 1 MB until a search finds it."""
    text = ""
    while len(text) < 1_000_000:
        text += text_of(seed + len(text), 400)
    store = client.vector_stores.create()
    begun = time.perf_counter()
    file = client.files.create(file=("text.txt", text[:1_000_000].encode()), purpose="assistants")
    client.vector_stores.files.create(store.id, file_id=file.id)
    while client.vector_stores.files.retrieve(file.id, vector_store_id=store.id).status == "in_progress":
        time.sleep(0.01)
    assert client.vector_stores.search(store.id, query=text[:80]).data
    took = time.perf_counter() - begun
    client.vector_stores.delete(store.id)
    client.files.delete(file.id)
    return took


def first_token_ms(ask: Callable[[], Any]) -> tuple[float, Any]:
    begun, first, last = time.perf_counter(), 0.0, None
    for event in ask():
        if not first and event.type == "response.output_text.delta":
            first = (time.perf_counter() - begun) * 1000
        last = event
    return first, last


def compared(client: OpenAI, rounds: int) -> dict[str, Any]:
    """The same prompt with and without a search, in turns; the salt keeps both from the prefix cache."""
    tool: Any = {"type": "file_search", "vector_store_ids": [STORE], "max_num_results": 4}
    plain, searched, resolved, cited = [], [], 0, 0
    for number in range(rounds + 1):
        question = text_of(10_000_000 + number, 8)
        common: Any = {
            "model": CHAT,
            "max_output_tokens": 24,
            "temperature": 0,
            "stream": True,
            "store": False,
        }

        def with_search(question: str = question, salt: str = f"a{number}", common: Any = common) -> Any:
            extra = {"cache_salt": salt}
            include: Any = ["file_search_call.results"]
            return client.responses.create(
                input=question, tools=[tool], include=include, extra_body=extra, **common
            )

        took, last = first_token_ms(with_search)
        call, message = last.response.output
        for note in message.content[0].annotations:
            extra = note.model_extra
            content = client.vector_stores.files.content(note.file_id, vector_store_id=STORE).data[0].text
            cited += 1
            resolved += content[extra["begin"] : extra["end"]] == extra["quote"]
        shown = "\n\n".join(
            f"[{i}] {one.filename}\n{one.text.strip()}" for i, one in enumerate(call.results, 1)
        )
        prompt = f"Passages:\n\n{shown}\n\nQuestion: {question}"

        def without(prompt: str = prompt, salt: str = f"b{number}", common: Any = common) -> Any:
            extra = {"cache_salt": salt}
            return client.responses.create(
                input=prompt, instructions=system_text(None), extra_body=extra, **common
            )

        alone, _ = first_token_ms(without)
        if number:  # the first round warms up
            plain.append(alone)
            searched.append(took)
    added = [one - other for one, other in zip(searched, plain, strict=True)]
    return {
        "plain_ms": plain,
        "searched_ms": searched,
        "added_ms_median": statistics.median(added),
        "added_ms": added,
        "citations": cited,
        "citations_resolved": resolved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=100_000, help="chunks of the prepared store")
    parser.add_argument("--state", type=Path, help="keep the prepared state here, or use what is there")
    parser.add_argument("--prepare", action="store_true", help="prepare --state and end")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of answers")
    parser.add_argument("--megabytes", type=int, default=3, help="uploads of 1 MB")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        state = args.state or Path(name) / "state"
        if not (state / "retrieval").exists():
            print(f"preparing {args.chunks} chunks …", file=sys.stderr)
            asyncio.run(prepare(state / "retrieval", args.chunks))
        if args.prepare:
            return
        process, url = started(state, Path(name) / "log")
        try:
            client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=600)
            figures = compared(client, args.rounds)
            figures["ingest_1mb_s"] = [ingest_s(client, seed) for seed in range(args.megabytes)]
        finally:
            process.terminate()
            process.wait()
    ingest = figures["ingest_1mb_s"]
    print(f"{'':34}{'median':>10}{'least':>10}{'most':>10}{'bar':>8}")
    added = figures["added_ms"]
    rows = [
        (f"search adds, {args.chunks} chunks, ms", added, "15"),
        ("first token, plain, ms", figures["plain_ms"], ""),
        ("first token, file_search, ms", figures["searched_ms"], ""),
        ("1 MB until searchable, s", ingest, "3"),
    ]
    for label, values, bar in (row for row in rows if row[1]):
        shown = (statistics.median(values), min(values), max(values))
        print(f"{label:34}" + "".join(f"{value:10.1f}" for value in shown) + f"{bar:>8}")
    print(f"citations that resolve: {figures['citations_resolved']} of {figures['citations']} (bar: all)")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
