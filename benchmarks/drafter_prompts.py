"""Prompts to train a draft head on, from the questions of public evaluation sets.

    python benchmarks/drafter_prompts.py FOLDER --out train.jsonl
    ridgeline train-drafter smollm2-135m --prompts train.jsonl --own-questions 4000 --samples 32768 \\
        --learning-rate 1e-3 --minutes 4 --device cuda \\
        --held-out mt-bench.jsonl --held-out gsm8k.jsonl --out smollm2-eagle3

FOLDER has arc_easy, arc_challenge, commonsense_qa, piqa (`query` in each line), svamp and lambada_openai
(`context`), each as .jsonl. MT-bench, GSM8K and HumanEval are never in it: they are what a head is judged by.
The same files give the same prompts.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

QUESTIONS = {"arc_easy": 900, "arc_challenge": 500, "commonsense_qa": 300, "piqa": 700}
ASKED = (
    "{}",
    "{}",
    "{} Explain step by step.",
    "{} Explain your answer.",
    "Write a short text about this: {}",
)
SOLVED = ("{}", "{} Think step by step.", "Solve this problem: {}")
REWRITTEN = ("Continue this story: {}", "Summarize this text: {}", "Rewrite this text in simple words: {}")


def bare(text: str) -> str:
    return text.split("\nChoices")[0].replace("Question:", "").replace("Answer:", "").strip()


def prompts(folder: Path) -> list[str]:
    rng = random.Random(0)

    def rows(name: str, field: str) -> list[str]:
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line)[field] for line in lines]

    found = []
    for name, count in QUESTIONS.items():
        found += [rng.choice(ASKED).format(bare(text)) for text in rng.sample(rows(name, "query"), count)]
    found += [rng.choice(SOLVED).format(bare(text)) for text in rows("svamp", "context") * 4]
    stories = rng.sample(rows("lambada_openai", "context"), 600)
    found += [rng.choice(REWRITTEN).format(text[:600]) for text in stories]
    rng.shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts(args.folder)))


if __name__ == "__main__":
    main()
