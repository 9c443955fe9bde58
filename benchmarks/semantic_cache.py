"""How far questions may differ before a semantic cache answers the wrong one: real embeddings, made-up pairs.

Each question stands beside a paraphrase, which should hit, and beside questions that look alike and want
another answer: a number, a name, a negation or an opposite changed. Prints, for each threshold, the share of
each kind that would be answered from the cache, by similarity alone and with the words that must agree. Then
the same for all pairs of thousands of real questions (GSM8K, MMLU), every hit among which is wrong but for
the questions that stand there twice; these are printed to be judged.

    python benchmarks/semantic_cache.py [--questions 4000] [--list] [--json out.json]
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.gateway.caching.wording import Wording

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

ROUTING = Path(__file__).resolve().parents[2] / "shared" / "data" / "routing"
LONGEST = 512  # bytes; longer ones a semantic cache leaves alone
KINDS = ("paraphrase", "number", "name", "negation", "opposite")
THRESHOLDS = (0.80, 0.85, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)

# question, then in the order of KINDS; empty: makes no sense there
QUESTIONS: tuple[tuple[str, str, str, str, str, str], ...] = (
    (
        "What was the population of Berlin in 1990?",
        "How many people lived in Berlin in 1990?",
        "What was the population of Berlin in 1991?",
        "What was the population of Munich in 1990?",
        "",
        "",
    ),
    (
        "Can I take ibuprofen with alcohol?",
        "Is it okay to take ibuprofen with alcohol?",
        "",
        "Can I take paracetamol with alcohol?",
        "Can I take ibuprofen without alcohol?",
        "",
    ),
    (
        "How do I sort a list in ascending order in Python?",
        "In Python, how can I sort a list in ascending order?",
        "",
        "How do I sort a list in ascending order in Java?",
        "How do I not sort a list in ascending order in Python?",
        "How do I sort a list in descending order in Python?",
    ),
    (
        "What is the capital of Australia?",
        "Which city is the capital of Australia?",
        "",
        "What is the capital of Austria?",
        "What is not the capital of Australia?",
        "",
    ),
    (
        "Convert 15 miles to kilometres.",
        "How many kilometres are 15 miles?",
        "Convert 50 miles to kilometres.",
        "",
        "",
        "Convert 15 kilometres to miles.",
    ),
    (
        "Summarize the refund policy for orders over 30 days old.",
        "Give me a summary of the refund policy for orders over 30 days old.",
        "Summarize the refund policy for orders over 60 days old.",
        "",
        "Summarize the refund policy for orders not over 30 days old.",
        "Summarize the refund policy for orders under 30 days old.",
    ),
    (
        "Which countries joined the European Union in 2004?",
        "What countries entered the European Union in 2004?",
        "Which countries joined the European Union in 2007?",
        "Which countries joined the African Union in 2004?",
        "Which countries did not join the European Union in 2004?",
        "Which countries left the European Union in 2004?",
    ),
    (
        "How do I enable two-factor authentication?",
        "How can I turn on two-factor authentication?",
        "",
        "",
        "",
        "How do I disable two-factor authentication?",
    ),
    (
        "Is the Eiffel Tower taller than 300 metres?",
        "Is the height of the Eiffel Tower more than 300 metres?",
        "Is the Eiffel Tower taller than 350 metres?",
        "Is the Tokyo Tower taller than 300 metres?",
        "Is the Eiffel Tower not taller than 300 metres?",
        "Is the Eiffel Tower shorter than 300 metres?",
    ),
    (
        "What are the side effects of aspirin?",
        "Which side effects does aspirin have?",
        "",
        "What are the side effects of warfarin?",
        "What are not side effects of aspirin?",
        "What are the benefits of aspirin?",
    ),
    (
        "Who won the World Cup in 2014?",
        "Which team won the World Cup in 2014?",
        "Who won the World Cup in 2018?",
        "Who won the Champions League in 2014?",
        "Who did not win the World Cup in 2014?",
        "Who lost the World Cup final in 2014?",
    ),
    (
        "Write a regular expression that matches three digits.",
        "Give me a regex that matches three digits.",
        "Write a regular expression that matches four digits.",
        "",
        "Write a regular expression that does not match three digits.",
        "",
    ),
    (
        "What is the boiling point of water at 2000 metres?",
        "At what temperature does water boil at 2000 metres?",
        "What is the boiling point of water at 3000 metres?",
        "What is the boiling point of ethanol at 2000 metres?",
        "",
        "What is the freezing point of water at 2000 metres?",
    ),
    (
        "My order has not arrived yet. What should I do?",
        "My order still has not arrived. What can I do?",
        "",
        "",
        "My order has arrived. What should I do?",
        "",
    ),
    (
        "How much notice must a tenant give before moving out?",
        "What notice period must a tenant give before moving out?",
        "",
        "",
        "",
        "How much notice must a landlord give before moving in?",
    ),
    (
        "Translate 'good morning' into French.",
        "How do you say 'good morning' in French?",
        "",
        "Translate 'good morning' into Spanish.",
        "",
        "Translate 'good evening' into French.",
    ),
    (
        "What is 17 times 24?",
        "How much is 17 times 24?",
        "What is 17 times 25?",
        "",
        "",
        "What is 17 divided by 24?",
    ),
    (
        "List the ingredients of pancakes for 4 people.",
        "Which ingredients do I need for pancakes for 4 people?",
        "List the ingredients of pancakes for 6 people.",
        "List the ingredients of waffles for 4 people.",
        "List the ingredients of pancakes for 4 people without eggs.",
        "",
    ),
    (
        "What does HTTP status code 404 mean?",
        "What is the meaning of HTTP status code 404?",
        "What does HTTP status code 403 mean?",
        "",
        "What does HTTP status code 404 not mean?",
        "",
    ),
    (
        "How can I increase the font size in the editor?",
        "How do I make the font size in the editor larger?",
        "",
        "",
        "",
        "How can I decrease the font size in the editor?",
    ),
    (
        "Was Napoleon born before 1770?",
        "Did Napoleon's birth take place before 1770?",
        "Was Napoleon born before 1760?",
        "Was Wellington born before 1770?",
        "Was Napoleon not born before 1770?",
        "Was Napoleon born after 1770?",
    ),
    (
        "Should employees use the VPN when working from home?",
        "Do employees have to use the VPN when they work from home?",
        "",
        "",
        "Should employees not use the VPN when working from home?",
        "Should employees use the VPN when working from the office?",
    ),
    (
        "What is the interest on $5,000 at 3% for two years?",
        "How much interest do I get on $5,000 at 3% over two years?",
        "What is the interest on $5,000 at 4% for two years?",
        "",
        "",
        "",
    ),
    (
        "Explain how photosynthesis works.",
        "Please explain the way photosynthesis works.",
        "",
        "Explain how chemosynthesis works.",
        "",
        "Explain how respiration works.",
    ),
    (
        "How do I undo the last commit in git?",
        "How can I revert my last commit in git?",
        "How do I undo the last 3 commits in git?",
        "How do I undo the last commit in Mercurial?",
        "",
        "How do I undo the first commit in git?",
    ),
    (
        "Which vitamins are not soluble in water?",
        "What vitamins are not water soluble?",
        "",
        "Which minerals are not soluble in water?",
        "Which vitamins are soluble in water?",
        "",
    ),
    (
        "Does the free plan include email support?",
        "Is email support included in the free plan?",
        "",
        "Does the pro plan include email support?",
        "Does the free plan not include email support?",
        "Does the free plan exclude email support?",
    ),
    (
        "How long is the flight from London to New York?",
        "What is the duration of a flight from London to New York?",
        "",
        "How long is the flight from London to New Delhi?",
        "",
        "How long is the flight from New York to London?",
    ),
    (
        "What are the arguments for nuclear power?",
        "Which arguments speak for nuclear power?",
        "",
        "What are the arguments for solar power?",
        "",
        "What are the arguments against nuclear power?",
    ),
    (
        "Who is the author of Dune?",
        "Who wrote Dune?",
        "Who is the author of Dune 2?",
        "Who is the author of Emma?",
        "Who is not the author of Dune?",
        "",
    ),
    (
        "Is it safe to mix bleach and vinegar?",
        "Can bleach and vinegar be mixed safely?",
        "",
        "Is it safe to mix soap and vinegar?",
        "Is it not safe to mix bleach and vinegar?",
        "Is it dangerous to mix bleach and vinegar?",
    ),
    (
        "What time does the store open on Sunday?",
        "When does the store open on Sunday?",
        "",
        "What time does the store open on Monday?",
        "",
        "What time does the store close on Sunday?",
    ),
)


async def vectors_of(model: str, texts: list[str]) -> np.ndarray[Any, Any]:
    from ridgeline.engine.client.client import AsyncClient

    async with await AsyncClient.start(model) as client:
        rows = np.asarray(await client.embed(client.tokenizer.encode_all(texts)))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def pairs() -> list[tuple[str, str, str]]:
    """kind, first question, second question"""
    return [
        (kind, first, other)
        for first, *others in QUESTIONS
        for kind, other in zip(KINDS, others, strict=True)
        if other
    ]


def real_questions(count: int) -> list[str]:
    """Different questions that people wrote, as many as asked for; none where the data are not there."""
    files = [ROUTING / "gsm8k_responses.csv", *sorted((ROUTING / "mmlu").glob("*.csv"))]
    texts: list[str] = []
    for path in filter(Path.is_file, files):
        with path.open(encoding="utf-8", newline="") as file:
            texts += [row["prompt"].removesuffix("\nAnswer:") for row in csv.DictReader(file)]
    short = [text for text in dict.fromkeys(texts) if len(text.encode()) <= LONGEST]
    random.Random(1).shuffle(short)
    return short[:count]


def judge_pairs(vectors: np.ndarray[Any, Any], texts: list[str]) -> list[tuple[float, bool, str, str]]:
    """Every pair above the least threshold that matters: similarity, whether the words agree, the texts."""
    similarities = np.triu(vectors @ vectors.T, 1)
    rows, columns = np.nonzero(similarities >= 0.90)
    return [
        (
            float(similarities[one, two]),
            Wording.of(texts[one]).agrees(Wording.of(texts[two])),
            texts[one],
            texts[two],
        )
        for one, two in zip(rows, columns, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="all-minilm-l6-v2")
    parser.add_argument("--questions", type=int, default=4000, help="real ones to compare; 0: none")
    parser.add_argument("--list", action="store_true", help="every pair with its similarity")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    rows, real = pairs(), real_questions(args.questions)
    texts = sorted({text for _, *two in rows for text in two})
    place = {text: number for number, text in enumerate(texts)}
    vectors = asyncio.run(vectors_of(args.model, texts + real))
    judged = [
        (
            kind,
            float(vectors[place[one]] @ vectors[place[two]]),
            Wording.of(one).agrees(Wording.of(two)),
            one,
            two,
        )
        for kind, one, two in rows
    ]
    written = {"model": args.model, "made_up": print_made_up(args.model, judged)}
    if args.list:
        for kind, similarity, same, one, two in sorted(judged, key=lambda row: -row[1]):
            print(f"{similarity:.3f} {'=' if same else '≠'} {kind:<10} {one} | {two}")
    if real:
        written["real"] = print_real(len(real), judge_pairs(vectors[len(texts) :], real))
    if args.json:
        args.json.write_text(json.dumps(written, indent=2))


def print_made_up(model: str, judged: list[tuple[str, float, bool, str, str]]) -> list[dict[str, Any]]:
    counts = {kind: sum(row[0] == kind for row in judged) for kind in KINDS}
    print(f"{model}: " + ", ".join(f"{count} of {kind}" for kind, count in counts.items()))
    print("\nmedian and largest similarity")
    for kind in KINDS:
        found = [similarity for k, similarity, *_ in judged if k == kind]
        print(f"  {kind:<11} {np.median(found):.3f}  {max(found):.3f}")
    table: list[dict[str, Any]] = []
    for strict in (False, True):
        print("\nanswered from the cache, " + ("words must agree" if strict else "similarity alone"))
        print("  threshold  " + "  ".join(f"{kind:>10}" for kind in KINDS))
        for threshold in THRESHOLDS:
            hits = {
                kind: sum(k == kind and s >= threshold and (same or not strict) for k, s, same, *_ in judged)
                for kind in KINDS
            }
            table.append({"threshold": threshold, "strict": strict, "hits": hits, "of": counts})
            cells = (f"{hits[kind]}/{counts[kind]}" for kind in KINDS)
            print(f"  {threshold:9.2f}  " + "  ".join(f"{cell:>10}" for cell in cells))
    return table


def print_real(count: int, judged: list[tuple[float, bool, str, str]]) -> list[dict[str, Any]]:
    print(f"\n{count} real questions, {count * (count - 1) // 2:,} pairs: answered from the cache")
    print("  threshold  similarity alone  words must agree")
    table = []
    for threshold in (each for each in THRESHOLDS if each >= 0.90):
        alone = sum(similarity >= threshold for similarity, *_ in judged)
        strict = sum(similarity >= threshold and same for similarity, same, *_ in judged)
        table.append({"threshold": threshold, "alone": alone, "strict": strict})
        print(f"  {threshold:9.2f}  {alone:>16}  {strict:>16}")
    for similarity, same, one, two in judged:
        if same:
            print(f"\n{similarity:.3f}\n  {one!r}\n  {two!r}")
    return table


if __name__ == "__main__":
    main()
