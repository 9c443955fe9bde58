"""What the gateway's guard finds, and what it costs: recall and precision per kind on a generated corpus,
ours and Presidio's; streamed = whole for every split; microseconds per kB of clean and of dense text.

The corpus (tests/gateway/guard/corpus.py) is made from its own formats, with valid check digits, in many
languages and layouts, and with negatives; names are left out. The bar: recall of at least 0.99 for each kind.

    python benchmarks/gateway_guard.py [--texts 3000] [--seed 7] [--split-texts 300] [--no-presidio]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ridgeline.gateway.guard.config import DEFAULT_REGIONS
from ridgeline.gateway.guard.config import KINDS as ALL_KINDS
from ridgeline.gateway.guard.phones import PhoneDetector
from ridgeline.gateway.guard.scanner import ScannedText, Scanner, built_in
from tests.gateway.guard.corpus import KINDS, Sample, corpus
from tests.gateway.guard.measure import Score, interval, measure

BAR = 0.99
CLEAN = (
    "The committee met on a grey morning, and - as nobody had read the minutes - went home before the rain. "
)
DENSE = (
    "order 12345 on 2024-05-06 12:30 v1.2.3.4 ref 99-8877-66 total 1,234.56, mail a.b@example.org, "
    "+49 30 1234567; "
)
Find = Callable[[str], Iterable[tuple[int, int, str]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--split-texts", type=int, default=300, help="texts that are divided at every place")
    parser.add_argument("--presidio", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--misses", type=int, default=0, help="show so many of what was missed or wrong")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    samples = corpus(arguments.texts, arguments.seed)
    scanner = Scanner(built_in(ALL_KINDS, PhoneDetector(DEFAULT_REGIONS, bare=False)))
    report: dict[str, Any] = {"texts": len(samples), "seed": arguments.seed}
    report["ridgeline"] = shown("ridgeline", samples, scanner.findings, KINDS, arguments.misses)
    if arguments.presidio:
        report["presidio"] = shown("presidio", samples, presidio(), KINDS[:-1], arguments.misses)
    report["splits"] = splits(scanner, samples[: arguments.split_texts])
    report["us_per_kb"] = costs(scanner.findings, presidio() if arguments.presidio else None)
    met = all(report["ridgeline"][kind]["recall"] >= BAR for kind in KINDS) and not report["splits"]["differ"]
    print(f"\nthe bar (recall ≥ {BAR} for every kind, streamed = whole): {'met' if met else 'MISSED'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    sys.exit(not met)


def shown(
    name: str, samples: list[Sample], find: Find, kinds: tuple[str, ...], misses: int
) -> dict[str, Any]:
    scores = measure(samples, find, kinds)
    print(f"\n{name} on {len(samples)} texts")
    print(
        f"{'kind':8} {'values':>6}  {'recall':>7} {'95 %':^15}"
        f"  {'findings':>8}  {'precision':>9} {'95 %':^15}"
    )
    for kind, score in scores.items():
        low, high = interval(score.found, score.values)
        floor, top = interval(score.right, score.findings)
        print(
            f"{kind:8} {score.values:6}  {score.recall:7.4f} {low:.4f}–{high:.4f}  {score.findings:8}"
            f"  {score.precision:9.4f} {floor:.4f}–{top:.4f}"
        )
        for form, text in [*score.missed[:misses], *score.wrong[:misses]]:
            print(f"         {form!r} in {text[:100]!r}")
    return {kind: figures(score) for kind, score in scores.items()}


def figures(score: Score) -> dict[str, Any]:
    return {
        "values": score.values,
        "recall": score.recall,
        "recall_interval": interval(score.found, score.values),
        "findings": score.findings,
        "precision": score.precision,
        "precision_interval": interval(score.right, score.findings),
    }


def presidio() -> Find:
    """Its pattern recognisers with their own defaults; it has none for keys."""
    from presidio_analyzer import predefined_recognizers as known

    recognizers = {
        "email": known.EmailRecognizer(),
        "phone": known.PhoneRecognizer(),
        "card": known.CreditCardRecognizer(),
        "iban": known.IbanRecognizer(),
        "ip": known.IpRecognizer(),
    }

    def find(text: str) -> list[tuple[int, int, str]]:
        return [
            (result.start, result.end, kind)
            for kind, recognizer in recognizers.items()
            for result in recognizer.analyze(text, recognizer.supported_entities)
        ]

    return find


def splits(scanner: Scanner, samples: list[Sample]) -> dict[str, int]:
    """Every text divided in two at every place, and into single characters."""
    tried = differ = 0

    def marked(kind: str, value: str) -> str:
        return f"<{kind}:{value}>"

    for sample in samples:
        text = sample.text
        whole = scanner.replaced(text, marked)
        for cut in range(len(text) + 1):
            channel = ScannedText(scanner, marked)
            tried += 1
            differ += channel.feed(text[:cut]) + channel.feed(text[cut:]) + channel.finish() != whole
        channel = ScannedText(scanner, marked)
        tried += 1
        differ += "".join(map(channel.feed, text)) + channel.finish() != whole
    print(f"\nstreamed = whole: {tried} splits of {len(samples)} texts, {differ} differ")
    return {"tried": tried, "differ": differ}


def costs(ours: Find, theirs: Find | None) -> dict[str, float]:
    table = {}
    for name, line in (("clean", CLEAN), ("dense", DENSE)):
        text = (line * 20)[:1000]
        table[f"{name}, ridgeline"] = best_us(ours, text, 200)
        if theirs is not None:
            table[f"{name}, presidio"] = best_us(theirs, text, 3)
    print("\nmicroseconds per kB: " + "; ".join(f"{name} {value:.1f}" for name, value in table.items()))
    return table


def best_us(find: Find, text: str, count: int) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            list(find(text))
        best = min(best, (time.perf_counter() - start) / count)
    return best * 1e6


if __name__ == "__main__":
    main()
