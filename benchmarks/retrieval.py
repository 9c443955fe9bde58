"""Vector search against numpy and sqlite-vec, in turns in one run, on the same threads.

Every row prints recall@10 beside its time: results are compared with an exact search in double precision.
Rounds are interleaved; the table shows the median, the best and the worst. With --judged instead: nDCG@10 and
recall@100 of BM25 beside bm25s, of vector search, of both, and of both with MaxSim, on a collection of
benchmarks/judged_collections.py.

    python benchmarks/retrieval.py [--rows 100000] [--dimensions 384] [--threads 2] [--rounds 15]
    python benchmarks/retrieval.py --judged FOLDER_OR_FILE [--queries 200] [--model all-minilm-l6-v2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = next((v for a, v in zip(sys.argv, sys.argv[1:], strict=False) if a == "--threads"), "2")
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = THREADS  # read by numpy when it is imported

import numpy as np  # noqa: E402
from judged_collections import collection  # noqa: E402

from ridgeline.ops.cpu.library import measure_read  # noqa: E402
from ridgeline.ops.cpu.scan import Scanner, ScanRows  # noqa: E402
from ridgeline.retrieval.lexical.index import LexicalIndex, best_rows  # noqa: E402
from ridgeline.retrieval.lexical.reference import K1, B  # noqa: E402
from ridgeline.retrieval.lexical.terms import packed, terms_of  # noqa: E402
from ridgeline.retrieval.metrics import mean_metrics  # noqa: E402

K = 10
Search = Callable[[np.ndarray], np.ndarray]


def unit(rng: np.random.Generator, rows: int, dimensions: int) -> np.ndarray:
    made = rng.normal(size=(rows, dimensions)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def numpy_search(vectors: np.ndarray) -> Search:
    turned = np.ascontiguousarray(vectors.T)

    def search(queries: np.ndarray) -> np.ndarray:
        scores = queries @ turned
        best = np.argpartition(-scores, K, axis=1)[:, :K]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
        return np.take_along_axis(best, order, axis=1)

    return search


def native_search(vectors: np.ndarray, threads: int) -> tuple[Search, int]:
    rows = ScanRows(vectors.shape[1], len(vectors))
    rows.store(np.arange(len(vectors), dtype=np.int32), vectors)
    mask = np.packbits(np.arange(rows.capacity) < len(vectors), bitorder="little").view("<u2")
    scanner = Scanner(threads)
    return lambda queries: scanner.search(rows, mask, queries, K)[0], rows.nbytes


def sqlite_vec_search(vectors: np.ndarray) -> Search | None:
    """None, and a line that says why, where it cannot be loaded."""
    try:
        import sqlite_vec

        try:
            import pysqlite3 as sqlite3  # many builds of Python load no extensions
        except ImportError:
            import sqlite3
        database = sqlite3.connect(":memory:")
        database.enable_load_extension(True)
    except (ImportError, AttributeError) as error:
        print(f"sqlite-vec is left out: {error}; pip install sqlite-vec pysqlite3-binary")
        return None
    sqlite_vec.load(database)
    database.execute(f"CREATE VIRTUAL TABLE v USING vec0(e float[{vectors.shape[1]}] distance_metric=cosine)")
    database.executemany(
        "INSERT INTO v(rowid, e) VALUES (?, ?)", ((i, row.tobytes()) for i, row in enumerate(vectors))
    )
    sql = "SELECT rowid FROM v WHERE e MATCH ? AND k = ? ORDER BY distance"

    def search(queries: np.ndarray) -> np.ndarray:
        return np.array([[row[0] for row in database.execute(sql, (q.tobytes(), K))] for q in queries])

    return search


def recall(found: np.ndarray, vectors: np.ndarray, queries: np.ndarray) -> float:
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    best = np.argsort(-exact, axis=1)[:, :K]
    return float(
        np.mean([len(set(a) & set(b)) / K for a, b in zip(found.tolist(), best.tolist(), strict=True)])
    )


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    vectors = unit(rng, args.rows, args.dimensions)
    ours, held = native_search(vectors, args.threads)
    peers: dict[str, Search | None] = {
        "ridgeline": ours,
        "numpy f32": numpy_search(vectors),
        "sqlite-vec": sqlite_vec_search(vectors),
    }
    read = measure_read(args.rows * args.dimensions, args.threads)
    limit_ms = args.rows * args.dimensions / read * 1e3
    print(f"{args.rows} x {args.dimensions}, {args.threads} threads, k = {K}; {held / 1e6:.0f} MB held")
    print(f"limit: the bytes of the rows read once take {limit_ms:.2f} ms at {read / 1e9:.1f} GB/s\n")
    print(
        f"{'queries':>7}  {'search':<11} {'median ms':>10} {'best':>8} {'worst':>8} "
        f"{'queries/s':>10} {'recall@10':>9}"
    )
    found: list[dict[str, Any]] = []
    for count in (1, 32, 128):
        queries = unit(rng, count, args.dimensions)
        times: dict[str, list[float]] = {name: [] for name, peer in peers.items() if peer is not None}
        for turn in range(args.rounds + 1):  # the first is not counted
            for name, peer in peers.items():
                if peer is None or (name == "sqlite-vec" and count > 1 and turn > 2):
                    continue  # takes seconds, one query after the other
                started = time.perf_counter()
                peer(queries)
                if turn:
                    times[name].append((time.perf_counter() - started) * 1e3)
        for name, values in times.items():
            peer = peers[name]
            assert peer is not None
            row = {
                "queries": count,
                "search": name,
                "median_ms": statistics.median(values),
                "best_ms": min(values),
                "worst_ms": max(values),
                "queries_per_s": count / statistics.median(values) * 1e3,
                "recall_at_10": recall(peer(queries), vectors, queries),
                "limit_ms": limit_ms,
            }
            found.append(row)
            print(
                f"{count:>7}  {name:<11} {row['median_ms']:>10.2f} {row['best_ms']:>8.2f} "
                f"{row['worst_ms']:>8.2f} {row['queries_per_s']:>10.0f} {row['recall_at_10']:>9.4f}"
            )
    for count in (1, 32, 128):
        rows = {row["search"]: row["median_ms"] for row in found if row["queries"] == count}
        ratios = ", ".join(f"{rows[n] / rows['ridgeline']:.1f}x {n}" for n in rows if n != "ridgeline")
        print(f"{count} queries: {ratios}")
    return found


# ---- quality ----


async def ranked_by_searcher(
    name: str, texts: dict[str, str], queries: dict[str, str]
) -> dict[str, dict[str, list[str]]]:
    """The 100 best texts of each query: by vectors, by both legs, and by both with MaxSim."""
    from ridgeline.engine.client.client import AsyncClient
    from ridgeline.retrieval.search.embeddings import QueryEmbeddings
    from ridgeline.retrieval.search.rerank import MaxSim
    from ridgeline.retrieval.search.searcher import Searcher, SearchOptions
    from ridgeline.retrieval.stores.sqlite import SqliteStore
    from ridgeline.retrieval.types import Chunk, Document, Namespace, NamespaceSpec

    async with await AsyncClient.start(name) as client:
        most = client.hello.max_context
        before, after = client.tokenizer.special_ends()

        def ids_of(text: str) -> list[int]:
            bare = list(client.tokenizer.encode_starts(text)[0])
            return [*before, *bare[: most - len(before) - len(after)], *after]

        async def vectors(some: Any) -> np.ndarray:
            return np.asarray(await client.embed([ids_of(text) for text in some]), np.float32)

        async def token_vectors(some: Any) -> list[np.ndarray]:
            ids = [ids_of(text) for text in some]
            made = np.asarray(await client.embed(ids, want="tokens"), np.float32)
            rows = np.split(made, np.cumsum([len(one) for one in ids])[:-1])
            return [one[len(before) : len(one) - len(after)] for one in rows]

        with tempfile.TemporaryDirectory() as folder:
            store, namespace = SqliteStore(Path(folder) / "chunks.sqlite"), Namespace("", "judged")
            await store.open()
            await store.create(namespace, NamespaceSpec(client.hello.vector_size, name))
            ids = list(texts)
            for first in range(0, len(ids), 64):
                some = ids[first : first + 64]
                for id, vector in zip(some, await vectors([texts[id] for id in some]), strict=True):
                    chunk = Chunk(id, id, 0, 0, len(texts[id]), texts[id], vector=vector)
                    await store.put(namespace, Document(id, id, texts[id]), [chunk])
                print(f"\rembedded {first + len(some)} of {len(ids)}", end="", file=sys.stderr)
            print(file=sys.stderr)
            searcher = Searcher(store, QueryEmbeddings(vectors, name))
            ways = {
                "vector": SearchOptions(k=100),
                "hybrid": SearchOptions(k=100, text_weight=1.0),
                "hybrid + maxsim": SearchOptions(
                    k=100, text_weight=1.0, reranker=MaxSim(token_vectors), candidates=100
                ),
            }
            runs: dict[str, dict[str, list[str]]] = {name: {} for name in ways}
            for number, (query, text) in enumerate(queries.items(), 1):
                for way, options in ways.items():
                    found = await searcher.search(namespace, [" ".join(text.split())], options)
                    runs[way][query] = [hit.chunk.id for hit in found.hits]
                print(f"\rsearched {number} of {len(queries)}", end="", file=sys.stderr)
            print(file=sys.stderr)
            await store.close()
    return runs


def quality(place: Path, model: str, most: int) -> dict[str, dict[str, float]]:
    import bm25s

    texts, queries, judged = collection(place, most)
    ids, terms = list(texts), [terms_of(text) for text in texts.values()]
    index = LexicalIndex()
    index.add([packed(Counter(one)) for one in terms])
    everything = np.ones(len(ids), np.bool_)
    oracle = bm25s.BM25(method="lucene", k1=K1, b=B)
    oracle.index(terms, show_progress=False)
    runs: dict[str, dict[str, list[str]]] = {"BM25": {}, "bm25s": {}}
    for query, text in queries.items():
        words = list(dict.fromkeys(terms_of(text)))
        ours = best_rows(index.scores(words, everything), everything, 100)
        scores = oracle.get_scores(words) if words else np.zeros(len(ids))  # it refuses a query of no terms
        theirs = np.argsort(-scores, kind="stable")[:100]
        runs["BM25"][query] = [ids[i] for i in ours]
        runs["bm25s"][query] = [ids[i] for i in theirs]
    runs |= asyncio.run(ranked_by_searcher(model, texts, queries))
    found = {name: mean_metrics(run, judged, 10, 100) for name, run in runs.items()}
    print(f"\n{len(texts)} texts, {len(judged)} judged queries of {place}")
    for name, means in found.items():
        print(f"{name:<16} " + "  ".join(f"{metric} {value:.4f}" for metric, value in means.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--judged", type=Path, help="Cranfield's or a BEIR folder, or a file of wikitext")
    parser.add_argument("--queries", type=int, default=1000, help="queries of --judged, at most")
    parser.add_argument("--model", default="all-minilm-l6-v2", help="embedding model for --judged")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    if args.judged:
        found["quality"] = quality(args.judged, args.model, args.queries)
    else:
        found["speed"] = speed(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
