"""Speed and price of a subject: generated tokens per second with a few prompts in flight, once warm.

A second round finds its prompts in the prefix cache: they are short, and decoding is what is measured.
"""

from __future__ import annotations

import statistics
import time

from ridgeline.lab.evaluate.subjects.subject import Prompt, Subject

TOKENS = 64
ROUNDS = 3  # the median counts
TOPICS = ("a river", "a lamp", "two cities", "the sea", "an old map", "a train", "winter", "a garden")


def tokens_per_s(subject: Subject, concurrency: int) -> float | None:
    """None if the subject does not say how many tokens it generated."""
    prompts = [
        Prompt(
            f"{number}. Write a long story about {TOPICS[number % len(TOPICS)]}.\n\nOnce upon a time,",
            TOKENS,
            (),
        )
        for number in range(concurrency)
    ]
    subject.complete(prompts[:1], 1)
    speeds = []
    for _ in range(ROUNDS):
        started = time.monotonic()
        answers = subject.complete(prompts, concurrency)
        speeds.append(sum(answer.tokens for answer in answers) / (time.monotonic() - started))
    return statistics.median(speeds) or None


def usd_per_mtok(usd_per_hour: float | None, speed: float | None) -> float | None:
    """Of generated tokens, at that speed without pause."""
    return None if usd_per_hour is None or not speed else usd_per_hour / 3600 / speed * 1e6
