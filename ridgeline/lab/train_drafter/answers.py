"""The training data: prompts, and the answers that the model gives to them in served mode.

Answers are written to a file as they come, in the order of their numbers; a repeated command continues behind
the last complete line. The same options give the same prompts and seeds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.engine.client.llm import LLM
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.lab.errors import LabError
from ridgeline.lab.train_drafter.options import TrainOptions
from ridgeline.models.text.tokenizer import Tokenizer

CHUNK = 512  # answers between two lines of progress
FIELDS = ("prompt", "question", "query", "text", "context")
EVERY_HELD_OUT = 50
OPENINGS = ("", "How", "What", "Write", "Explain", "Why", "Give", "Can you", "Describe", "If", "In", "The")

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a prompt and of the model's answer to it."""

    prompt: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


def read_prompts(files: tuple[str, ...]) -> list[str]:
    """The texts of all files. Raises LabError for one without any."""
    found: list[str] = []
    for name in files:
        path = Path(name)
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise LabError(f"{name}: cannot be read: {error}") from None
        texts = [text for line in lines if line.strip() and (text := _text(line, path, name))]
        if not texts:
            raise LabError(
                f"{name}: has no prompts; a line has one of {', '.join(FIELDS)}, messages or turns"
            )
        found += texts
    return found


def _text(line: str, path: Path, name: str) -> str:
    if path.suffix != ".jsonl":
        return line.strip()
    try:
        item = json.loads(line)
    except ValueError as error:
        raise LabError(f"{name}: is not JSON lines: {error}") from None
    if isinstance(item.get("turns"), list):
        return str(item["turns"][0])
    if isinstance(item.get("messages"), list):
        return str(next((each["content"] for each in item["messages"] if each.get("role") == "user"), ""))
    return next((str(item[field]) for field in FIELDS if item.get(field)), "")


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """As a chat with one question; as plain text for a model without a chat template."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def sampled_answers(
    llm: LLM, texts: list[str], options: TrainOptions, path: Path, on_progress: OnProgress
) -> list[Answer]:
    """`options.samples` answers, those of an earlier run from the file."""
    done = _kept(path)
    total = options.samples
    if len(done) < total:
        prompts = list(_prompts(llm, texts, options))
        with path.open("a") as file:
            for begin in range(len(done), total, CHUNK):
                on_progress("answers", begin, total)
                part = range(begin, min(total, begin + CHUNK))
                found = llm.generate([prompts[n] for n in part], [_params(n, options) for n in part])
                answers = [Answer(one.prompt_ids, one.completions[0].tokens) for one in found]
                for answer in answers:
                    file.write(json.dumps([answer.prompt, answer.answer]) + "\n")
                file.flush()
                done += answers
    on_progress("answers", total, total)
    return done[:total]


def _params(number: int, options: TrainOptions) -> SamplingParams:
    hot = number % 2 == 0
    return SamplingParams(
        temperature=options.temperature if hot else 0.0,
        max_tokens=options.tokens,
        seed=options.seed * 1_000_003 + number,
    )


def _prompts(llm: LLM, texts: list[str], options: TrainOptions) -> Iterator[list[int]]:
    rng = random.Random(options.seed)
    if not texts or options.own_questions:
        texts = texts + _own_questions(llm, options, options.own_questions or min(options.samples, 2000))
    most = options.length - min(options.tokens, options.length // 2)
    order: list[str] = []
    for _ in range(options.samples):
        if not order:
            order = texts[:]
            rng.shuffle(order)
        yield prompt_ids(llm.tokenizer, order.pop())[:most]


def _own_questions(llm: LLM, options: TrainOptions, count: int) -> list[str]:
    """Questions in the model's own words: it continues the opening of a user's turn."""
    template = llm.tokenizer.chat_template
    mark = "\N{SECTION SIGN}\N{SECTION SIGN}"
    header = "" if template is None else template.render([{"role": "user", "content": mark}]).split(mark)[0]
    prompts = [
        llm.tokenizer.encode(header + OPENINGS[n % len(OPENINGS)], add_special=template is None)
        for n in range(count)
    ]
    params = [SamplingParams(temperature=1.0, max_tokens=48, seed=options.seed + n) for n in range(count)]
    found = llm.generate(prompts, params)
    texts = [OPENINGS[n % len(OPENINGS)] + one.completions[0].text for n, one in enumerate(found)]
    kept = [text.strip() for text in texts if text.strip()]
    if not kept:
        raise LabError("the model wrote no questions; give some with --prompts FILE")
    return kept


def _kept(path: Path) -> list[Answer]:
    """Complete lines of an earlier run; a line that was cut off is removed."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    whole = lines[:-1]  # behind the last newline is nothing, or half a line
    if lines[-1]:
        path.write_bytes(b"".join(line + b"\n" for line in whole))
    return [Answer(*json.loads(line)) for line in whole]


def split_held_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """Training prompts, and every 50th for the report."""
    held = texts[EVERY_HELD_OUT - 1 :: EVERY_HELD_OUT] or texts[-1:]
    known: set[Any] = set(held)
    return [text for text in texts if text not in known] or texts, held
