"""Speculation against plain decoding, in one process and in turn: copy-heavy text, code edits, chat.

Each prompt is answered with speculation off and on, one after the other, in an order that alternates; the
answers must be equal. Figures are output tokens per second of decoding, the ratio of the medians, and what
was guessed. What drafting costs the host: benchmarks/drafting_cost.py.

    python benchmarks/speculation.py [--model smollm2-135m] [--speculate suffix] [--rounds 3] [--streams 1]
        [--tokens 200] [--temperature 0] [--deterministic] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from ridgeline import LLM
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.engine.speculate.ngram import NgramDrafter
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.speculate.suffix import SuffixDrafter

TEXT = (
    "The harbour master wrote down every ship that came in before noon. The first was the Alma, with salt "
    "and rope. The second was the Corvina, with oranges, two passengers and a parrot. The third had no name "
    "on its bow, and its captain paid in silver. In the afternoon the wind turned, and nothing moved until "
    "the lamps were lit."
)
CODE = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
"""
WORK: dict[str, list[str]] = {
    "copy": [
        f"Repeat this text exactly, word for word:\n\n{TEXT}",
        f"Here is a text:\n\n{TEXT}\n\nWrite the same text again, unchanged.",
        f"Copy the following lines without changing anything:\n\n{CODE}",
    ],
    "edit": [
        f"Rename the class to Wallet and leave the rest as it is:\n\n{CODE}",
        f"Add a docstring to each method. Repeat all of the code:\n\n{CODE}",
    ],
    "chat": [
        "What is a good way to learn to cook?",
        "Write a short poem about the sea in winter.",
        "Explain to a child why the sky is blue.",
        "Name three inventions of the 19th century and say why they mattered.",
    ],
}
DRAFTERS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def run(llm: LLM, prompts: list[str], streams: int, params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens per second after the first token, and the answers."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts for _ in range(streams)]
    ids = [llm.tokenizer.encode_chat(chat) for chat in chats]
    tokens = seconds = 0.0
    answers: list[list[int]] = []
    for first in range(0, len(ids), streams):
        found = llm.generate(ids[first : first + streams], params)
        times = [one.completions[0].timing.token_times for one in found if one.completions[0].timing]
        tokens += sum(len(each) - 1 for each in times)
        seconds += max(each[-1] for each in times) - min(each[0] for each in times)
        answers += [one.completions[0].tokens for one in found]
    return tokens / seconds, answers


def compare(llm: LLM, name: str, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=1)
    core = llm.engine.core
    rates: dict[bool, list[float]] = {False: [], True: []}
    different = 0
    on: Speculation | None = None
    for turn in range(args.rounds):
        answers: dict[bool, list[list[int]]] = {}
        # Each round begins without past answers: what they add is not measured.
        on = Speculation(DRAFTERS[args.speculate](), llm.engine.spec.vocab_size)
        for is_on in (False, True) if turn % 2 else (True, False):
            core.speculation = on if is_on else None
            core.scheduler.reset_prefix_cache()
            rate, answers[is_on] = run(llm, prompts, args.streams, params)
            rates[is_on].append(rate)
        different += sum(a != b for a, b in zip(answers[False], answers[True], strict=True))
    assert on is not None
    stats = on.stats()
    off_rate, on_rate = statistics.median(rates[False]), statistics.median(rates[True])
    return {
        "work": name,
        "off_tokens_per_s": round(off_rate, 1),
        "on_tokens_per_s": round(on_rate, 1),
        "ratio": round(on_rate / off_rate, 3),
        "ratios": [round(b / a, 3) for a, b in zip(rates[False], rates[True], strict=True)],
        "different_answers": different,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "tokens_per_verified_row": round(1 + stats.accepted / max(stats.drafts, 1), 2),
        "predicted_gain": round(stats.predicted_gain, 2),
        "measured_gain": round(stats.measured_gain, 2),
        "draft_ms": round(1000 * stats.draft_s, 1),
        "off": stats.off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", choices=sorted(DRAFTERS), default="suffix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--work", choices=sorted(WORK), action="append")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    llm = LLM(args.model, speculate="off", deterministic=args.deterministic)
    for name in args.work or WORK:
        found.append(compare(llm, name, WORK[name], args))
        print(json.dumps(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
