"""Embeddings against sentence-transformers, in turns in one run, on the same cores: sentences per second.

Both tokenize the same texts. sentence-transformers gets them all at once and sorts them by length, so that
its batches hold little padding; ours are asked of an engine process, batch after batch as they come. Prints a
table and writes JSON: the ratio, the share of what the float32 units could do, and the largest difference.

    python benchmarks/embeddings.py [--rounds 5] [--sentences 512] [--batch 64] [--json out.json]
"""

from __future__ import annotations

import argparse
import asyncio
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
    texts, source = sentences(args.sentences)
    batches = [texts[at : at + args.batch] for at in range(0, len(texts), args.batch)]
    async with await AsyncClient.start(MODEL, threads=threads) as client:

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

        def theirs_once() -> Any:
            return theirs.encode(texts, batch_size=args.batch)

        lengths = [len(ids) for ids in client.tokenizer.encode_all(texts, spec.max_tokens)]
        flops = sum(spec.flops(length) for length in lengths)
        difference = float(np.abs(await ours_once() - theirs_once()).max())
        rates: dict[str, list[float]] = {"ours": [], "theirs": []}
        per_cpu_s: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(args.rounds):
            for name in rates:
                started, spent = time.perf_counter(), cpu_s(client.hello.pid)
                if name == "ours":
                    await ours_once()
                else:
                    theirs_once()
                rates[name].append(len(texts) / (time.perf_counter() - started))
                per_cpu_s[name].append(len(texts) / (cpu_s(client.hello.pid) - spent))
        # Best of some: what else runs only ever makes the ceiling look lower.
        peaks = [library.measure_peak(Peak.F32, threads) for _ in range(PEAK_TRIALS)]
        peak = max(client.hello.limits["flops_per_s"], *peaks)
        backend = client.hello.backend
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["theirs"], strict=True)]
    return {
        "model": MODEL,
        "backend": backend,
        "texts": source,
        "sentences": len(texts),
        "batch": args.batch,
        "tokens": {"mean": sum(lengths) / len(lengths), "least": min(lengths), "most": max(lengths)},
        "sentences_per_s": {name: {"median": medians[name], "all": values} for name, values in rates.items()},
        "sentences_per_cpu_s": {name: statistics.median(values) for name, values in per_cpu_s.items()},
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "share_of_flop_limit": {name: rate / len(texts) * flops / peak for name, rate in medians.items()},
        "flops_per_s_limit": peak,
        "largest_difference": difference,
        "load_average": os.getloadavg()[0],
    }


def cpu_s(engine_pid: int) -> float:
    """Seconds of CPU that this process and the engine have used: what other programs took is not in it."""
    fields = Path(f"/proc/{engine_pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def table(found: dict[str, Any]) -> str:
    tokens, ratio = found["tokens"], found["ratio"]
    lines = [
        f"{found['model']} · {found['backend']} · {found['sentences']} sentences ({found['texts']}), "
        f"{tokens['least']} to {tokens['most']} tokens, mean {tokens['mean']:.1f}, batch {found['batch']}",
        f"{'':<22}{'sentences/s':>12}{'spread':>18}{'of FLOP limit':>15}{'per CPU second':>16}",
    ]
    for name, label in (("ours", "ridgeline"), ("theirs", "sentence-transformers")):
        rates = found["sentences_per_s"][name]
        spread = f"{min(rates['all']):.0f} – {max(rates['all']):.0f}"
        share = found["share_of_flop_limit"][name]
        cpu = found["sentences_per_cpu_s"][name]
        lines.append(f"{label:<22}{rates['median']:>12.1f}{spread:>18}{share:>15.0%}{cpu:>16.1f}")
    lines.append(
        f"ratio {ratio['median']:.2f} ({ratio['least']:.2f} – {ratio['most']:.2f} over the rounds), "
        f"largest difference {found['largest_difference']:.1e}, load average {found['load_average']:.1f}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
