"""Speculation against plain decoding, and against llama.cpp's: copy-heavy text, code edits, chat.

Each prompt is answered with speculation off and on, one after the other, in an order that alternates; the
answers must be equal. Figures are output tokens per second of decoding, the ratio of each pair and their
median beside the bar, and what was guessed. With `--llama-cpp` its server answers the same prompts in these
rounds, plain and with each kind of its n-gram speculation; the best kind counts. What drafting costs the
host: benchmarks/drafting_cost.py.

    python benchmarks/speculation.py [--model smollm2-135m] [--speculate suffix] [--rounds 5] [--streams 1]
        [--tokens 200] [--work copy] [--deterministic] [--llama-cpp DIR] [--json FILE]

About 3 minutes for SmolLM2 and 8 for Qwen2.5-Coder-1.5B (`--work edit`) on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from versus.peer_llamacpp import find
from versus.speculating_peer import KINDS, SpeculatingPeer

from ridgeline import LLM
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.engine.speculate.ngram import NgramDrafter
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.speculate.suffix import SuffixDrafter
from ridgeline.machine import usable_cpus
from ridgeline.models.files.pull import ensure

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
DRAFTERS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
CHAT = (
    "What is a good way to learn to cook?",
    "Write a short poem about the sea in winter.",
    "Explain to a child why the sky is blue.",
    "Name three inventions of the 19th century and say why they mattered.",
    "My neighbour's dog barks all night. Write a polite letter to him.",
    "What should I look at when I buy a used bicycle?",
)


@dataclass(frozen=True)
class Work:
    """bar: least ratio of on to off, by model"""

    prompts: tuple[str, ...]
    bar: dict[str, float]
    temperature: float = 0.0


WORK = {
    "copy": Work(
        (
            f"Repeat this text exactly, word for word:\n\n{TEXT}",
            f"Here is a text:\n\n{TEXT}\n\nWrite the same text again, unchanged.",
            f"Copy the following lines without changing anything:\n\n{CODE}",
        ),
        {"smollm2-135m": 1.7},
    ),
    "edit": Work(
        (
            f"Rename the class to Wallet and leave the rest as it is:\n\n{CODE}",
            f"Add a docstring to each method. Repeat all of the code:\n\n{CODE}",
            f"Rename `amount` to `cents` everywhere and write the whole class again:\n\n{CODE}",
        ),
        {"qwen2.5-coder-1.5b": 1.5},
    ),
    "chat": Work(CHAT, {"smollm2-135m": 0.98, "qwen2.5-coder-1.5b": 0.98}),
    "chat, sampled": Work(CHAT, {"smollm2-135m": 0.98, "qwen2.5-coder-1.5b": 0.98}, temperature=0.8),
}


def run(
    llm: LLM, prompts: list[list[int]], streams: int, params: SamplingParams
) -> tuple[float, list[list[int]]]:
    """Tokens per second after the first token, and the answers."""
    ids = [prompt for prompt in prompts for _ in range(streams)]
    tokens = seconds = 0.0
    answers: list[list[int]] = []
    for first in range(0, len(ids), streams):
        found = llm.generate(ids[first : first + streams], params)
        times = [one.completions[0].timing.token_times for one in found if one.completions[0].timing]
        tokens += sum(len(each) - 1 for each in times)
        seconds += max(each[-1] for each in times) - min(each[0] for each in times)
        answers += [one.completions[0].tokens for one in found]
    return tokens / seconds, answers


def compare(llm: LLM, name: str, peer: SpeculatingPeer | None, args: argparse.Namespace) -> dict[str, Any]:
    work = WORK[name]
    chats = [[{"role": "user", "content": prompt}] for prompt in work.prompts]
    prompts = [llm.tokenizer.encode_chat(chat) for chat in chats]
    params = SamplingParams(max_tokens=args.tokens, temperature=work.temperature, seed=1)
    core = llm.engine.core
    rates: dict[bool, list[float]] = {False: [], True: []}
    peer_rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
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
        if peer is not None and turn < args.peer_rounds:
            for kind in KINDS:
                peer_rates[kind].append(peer.rate(kind, prompts, args.tokens, work.temperature))
    assert on is not None
    stats = on.stats()
    ratios = [b / a for a, b in zip(rates[False], rates[True], strict=True)]
    found = {
        "work": name,
        "model": args.model,
        "streams": args.streams,
        "off_tokens_per_s": round(statistics.median(rates[False]), 1),
        "on_tokens_per_s": round(statistics.median(rates[True]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "bar": work.bar.get(args.model),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "different_answers": different,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "tokens_per_verified_row": round(1 + stats.accepted / max(stats.drafts, 1), 2),
        "predicted_gain": round(stats.predicted_gain, 2),
        "measured_gain": round(stats.measured_gain, 2),
        "draft_ms": round(1000 * stats.draft_s, 1),
        "off": stats.off,
    }
    if peer is not None:
        theirs = {kind: statistics.median(each) for kind, each in peer_rates.items()}
        found["llama_cpp_tokens_per_s"] = {kind: round(rate, 1) for kind, rate in theirs.items()}
        found["over_best_of_llama_cpp"] = round(statistics.median(rates[True]) / max(theirs.values()), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", choices=sorted(DRAFTERS), default="suffix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--work", choices=sorted(WORK), action="append")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama-server and the others; one stream")
    parser.add_argument("--peer-rounds", type=int, default=1000, help="rounds with llama.cpp (default: all)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    peer = None
    if args.llama_cpp:
        if args.streams != 1:
            raise SystemExit("--llama-cpp is for --streams 1: its server has one slot here")
        peer = SpeculatingPeer(find(args.llama_cpp, usable_cpus()), ensure(args.model).path)
    found: list[dict[str, Any]] = []
    try:
        llm = LLM(args.model, speculate="off", deterministic=args.deterministic)
        for name in args.work or WORK:
            found.append(compare(llm, name, peer, args))
            print(json.dumps(found[-1]), flush=True)
    finally:
        if peer is not None:
            peer.stop()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
