"""The model router on real outcomes: what it saves on held-back questions, and how long a decision takes.

Outcomes of Mixtral-8x7B (weak) and GPT-4 (strong) on GSM8K and a part of MMLU, from ../shared/data/routing.
Quality is seeded and repeatable, whatever else the machine does. A time covers a whole decision, over HTTP,
by an embedding server started for it, on prompts that it has not seen before: for a quiet machine.

    python benchmarks/router.py quality [--data both,gsm8k,mmlu] [--splits part,folds,groups] [--json FILE]
    python benchmarks/router.py time [--decisions 1000] [--tokens 32,48,64,128] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in a gateway's worker

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from ridgeline.gateway.body import raw
from ridgeline.gateway.routing.config import EmbeddingsConfig, RouteConfig
from ridgeline.gateway.routing.embedder import Embedder, EmbeddingFailed, Vectors
from ridgeline.gateway.routing.learned.artifact import Artifact, save
from ridgeline.gateway.routing.learned.evaluation import GRID, evaluate
from ridgeline.gateway.routing.learned.examples import Costing, Examples, read_examples
from ridgeline.gateway.routing.learned.features import Recipe
from ridgeline.gateway.routing.learned.fitting import Prepared, fit_artifact
from ridgeline.gateway.routing.learned.report import lines_of
from ridgeline.gateway.routing.learned.vectors import VectorServer, store_path, vectors_of
from ridgeline.gateway.routing.learned.words import READ_CHARS, WORD_TOKENS, WordVectors
from ridgeline.gateway.routing.own_server import OwnServer
from ridgeline.gateway.routing.router import ModelRouter, RoutingRequest
from ridgeline.machine import cache_dir
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import read_url

ROUTING = Path(__file__).resolve().parents[2] / "shared" / "data" / "routing"
MODELS = ("mistralai/Mixtral-8x7B-Instruct-v0.1", "gpt-4-1106-preview")
EMBEDDING_MODEL = "all-minilm-l6-v2"
HELD_BACK = 0.4
WARM_UP = 50
BAR_MS = 10.0


def files(data: str) -> list[Path]:
    gsm8k, mmlu = [ROUTING / "gsm8k_responses.csv"], sorted((ROUTING / "mmlu").glob("*.csv"))
    return {"both": gsm8k + mmlu, "gsm8k": gsm8k, "mmlu": mmlu}[data]


def examples_of(data: str) -> Examples:
    return read_examples(files(data), MODELS, Costing({}, {}))


def prepared(examples: Examples, vectors: str, url: Callable[[], str]) -> tuple[Prepared, WordVectors | None]:
    of_words = vectors == "words"
    recipe = Recipe(head_chars=READ_CHARS) if of_words else Recipe()
    max_tokens = WORD_TOKENS if of_words else recipe.max_tokens

    def fetch() -> Any:
        return VectorServer(url(), EMBEDDING_MODEL, max_tokens).fetch

    def report(done: int, total: int) -> None:
        print(f"\r{done} of {total} vectors", end="\n" if done == total else "", file=sys.stderr)

    def embed(wanted: Sequence[str]) -> Vectors:
        return vectors_of(wanted, store_path(cache_dir(), EMBEDDING_MODEL, max_tokens), fetch, report)

    texts = [recipe.text(turns) for turns in examples.turns]
    if not of_words:
        return Prepared.of(examples, embed(texts)), None
    words = WordVectors.of(texts, embed)
    return Prepared.of(examples, words.many(texts)), words


# ---- quality ----


def quality(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    with OwnServer(EMBEDDING_MODEL) as server:
        for data in args.data.split(","):
            ready, _ = prepared(examples_of(data), args.vectors, server.start)
            for split in args.splits.split(","):
                if split == "groups" and data == "gsm8k":
                    continue  # one group
                judged = evaluate(
                    ready,
                    split=split,
                    held_back=HELD_BACK,
                    gap=args.gap / 100,
                    seed=args.seed,
                    draws=args.draws,
                    repeats=1 if split == "part" else args.repeats,
                )
                print(f"\n## {data}, {split}\n\n" + "\n".join(lines_of(judged)), flush=True)
                found.append({"data": data, "split": split, "costs": GRID, **asdict(judged)})
    return found


# ---- time ----


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with OwnServer(EMBEDDING_MODEL) as server:
        url = server.start()
        ready, words = prepared(examples_of("both"), args.vectors, lambda: url)
        order = np.random.default_rng(args.seed).permutation(len(ready.examples))
        asked, known = order[: args.decisions + WARM_UP], order[args.decisions + WARM_UP :]
        artifact = fit_artifact(
            ready.part(known),
            names=("small", "large"),
            gap=0.95,
            recipe=Recipe(head_chars=READ_CHARS) if words is not None else Recipe(),
            embedding_model=EMBEDDING_MODEL,
            seed=args.seed,
            words=words,
        )
        prompts = [ready.examples.turns[row][-1] for row in asked]
        print(f"{len(known)} examples in the artifact, {args.decisions} decisions one after the other")
        print("tokens   p50 ms   p90 ms   p99 ms   max ms  without vector p99")
        found = []
        for tokens in [0] if words is not None else map(int, args.tokens.split(",")):
            figures = uvloop.run(decisions(artifact, url, prompts, tokens))
            name = tokens or "words"
            print(
                f"{name:>6}  {figures['p50']:>7.2f}  {figures['p90']:>7.2f}  {figures['p99']:>7.2f}  "
                f"{figures['max']:>7.2f}  {figures['own_p99']:>18.2f}"
                + ("" if figures["p99"] <= BAR_MS else f"   above {BAR_MS:g} ms"),
                flush=True,
            )
            found.append({"tokens": tokens, "examples": len(known), **figures})
    return found


async def decisions(artifact: Artifact, url: str, prompts: list[str], tokens: int) -> dict[str, float]:
    """Milliseconds of whole decisions, as the pipeline waits for them; and of all but the vector."""
    config = EmbeddingsConfig(upstream="bench", model=EMBEDDING_MODEL, timeout_ms=10_000.0)
    client = HttpClient()
    vector_ms: list[float] = []
    embedder = Embedder(config, timed(post_to(client, url), vector_ms))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "route.npz"
        recipe = Recipe(head_chars=5 * tokens, max_tokens=tokens) if tokens else artifact.recipe
        save(replace(artifact, recipe=recipe), path)
        router = ModelRouter([RouteConfig(models=("small", "large"), artifact=path)], (), embedder)
    whole_ms = []
    gc.collect()
    gc.freeze()  # as a gateway's worker does
    for prompt in prompts:
        fields = {"messages": raw([{"role": "user", "content": prompt}])}
        started = time.perf_counter()
        decision = await router.decide(RoutingRequest("auto", "chat", fields, tenant="bench"))
        whole_ms.append((time.perf_counter() - started) * 1e3)
        if decision.why["by"] != "predicted":
            raise SystemExit(f"no prediction: {decision.why}")
    client.close()
    whole = np.array(whole_ms[WARM_UP:])
    own = whole - np.array(vector_ms[WARM_UP:]) if len(vector_ms) == len(whole_ms) else whole
    p50, p90, p99 = np.percentile(whole, (50, 90, 99))
    return {
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(whole.max()),
        "own_p99": float(np.percentile(own, 99)),
    }


def post_to(client: HttpClient, url: str) -> Callable[[bytes], Awaitable[bytes]]:
    origin = read_url(url)
    headers = [(b"content-type", b"application/json")]

    async def post(body: bytes) -> bytes:
        answer = await client.ask(origin, "POST", "/v1/embeddings", headers, body, timeouts=Timeouts())
        found = await answer.read(1 << 24)
        if answer.status != 200:
            raise EmbeddingFailed(f"status {answer.status}")
        return found

    return post


def timed(
    post: Callable[[bytes], Awaitable[bytes]], times_ms: list[float]
) -> Callable[[bytes], Awaitable[bytes]]:
    async def measured(body: bytes) -> bytes:
        started = time.perf_counter()
        answer = await post(body)
        times_ms.append((time.perf_counter() - started) * 1e3)
        return answer

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    first = parts.add_parser("quality")
    first.add_argument("--data", default="both,gsm8k,mmlu")
    first.add_argument("--splits", default="part,folds,groups")
    first.add_argument("--gap", type=float, default=95.0, help="percent of the gap")
    first.add_argument("--draws", type=int, default=1000)
    first.add_argument("--repeats", type=int, default=3, help="of folds and groups, split anew")
    first.set_defaults(run=quality)
    second = parts.add_parser("time")
    second.add_argument("--decisions", type=int, default=1000)
    second.add_argument("--tokens", default="32,48,64,128")
    second.set_defaults(run=measure)
    for part in (first, second):
        part.add_argument("--vectors", choices=("words", "text"), default="words")
        part.add_argument("--seed", type=int, default=0)
        part.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not ROUTING.is_dir():
        raise SystemExit(f"{ROUTING} is not here")
    found = args.run(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
