"""Calibration text: read from a file, cut into samples of equal length, some of them held out.

A .jsonl file has one object per line, with `text`, `prompt` or `messages`, or a batch request with such a
`body`: own prompts of `bench`, batch files and logs of requests have one of these forms. So has a recording
of `serve --record-traffic --record-texts`; one without texts has lengths and hashes alone, and is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.trace_rows import Trace
from ridgeline.models.text.tokenizer import Tokenizer

HELD_OUT_EVERY = 8  # one sample of this many
_JSON = (".jsonl", ".ndjson")


class _Body(msgspec.Struct):
    text: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class _Line(_Body):
    body: _Body | None = None
    hash_ids: list[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """fitted: samples that methods learn from; held_out: samples that only the report reads. [n, length]"""

    source: str
    held_out_source: str
    sha256: str  # of the text, or of both texts
    fitted: NDArray[np.int64]
    held_out: NDArray[np.int64]

    @property
    def length(self) -> int:
        return int(self.fitted.shape[1])


def read_calibration(
    path: Path, tokenizer: Tokenizer, samples: int, length: int, held_out: Path | None = None
) -> Calibration:
    """Up to `samples` samples of `length` tokens, spread evenly over the file.

    held_out: a file for the report, with an eighth as many samples; None: every eighth sample is held out.
    """
    chosen, digest = _samples(path, tokenizer, samples, length)
    if held_out is not None:
        others, other = _samples(held_out, tokenizer, max(1, samples // HELD_OUT_EVERY), chosen.shape[1])
        if others.shape[1] < chosen.shape[1]:
            raise BadInput(f"--held-out {held_out}: is shorter than two samples of {chosen.shape[1]} tokens")
        return Calibration(path.name, held_out.name, f"{digest} {other}", chosen, others)
    count = len(chosen)
    is_held = np.arange(count) % HELD_OUT_EVERY == min(HELD_OUT_EVERY, count) - 1
    return Calibration(path.name, path.name, digest, chosen[~is_held], chosen[is_held])


def _samples(path: Path, tokenizer: Tokenizer, samples: int, length: int) -> tuple[NDArray[np.int64], str]:
    """(samples [n, length], the file's SHA-256). Shorter samples if the text is short."""
    data = _bytes(path)
    texts = _jsonl(path, tokenizer) if path.suffix in _JSON else _plain(path, data, tokenizer)
    ids = np.array([token for text in texts for token in text], np.int64)
    length = min(length, len(ids) // 2)
    if length < 2:
        raise BadInput(
            f"{path}: has {len(ids)} tokens; calibration needs some thousands, better 50,000: pass more text"
        )
    every = ids[: len(ids) // length * length].reshape(-1, length)
    count = min(samples, len(every))
    chosen = every[np.linspace(0, len(every) - 1, count).round().astype(np.int64)]
    return chosen, hashlib.sha256(data).hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error


def _plain(path: Path, data: bytes, tokenizer: Tokenizer) -> Iterator[list[int]]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    yield tokenizer.encode(text, allow_special=False)


def _jsonl(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    trace = Trace(path, skip_bad_rows=False)
    found, untold = [], 0
    for number, line in trace.decoded(msgspec.json.Decoder(_Line)):
        said = line.body or line
        if line.hash_ids is not None:  # a recording: its texts have the template and special tokens
            if line.text:
                found.append(tokenizer.encode(line.text, add_special=False))
            untold += not line.text
        elif said.messages:
            found.append(tokenizer.encode_chat(said.messages, add_generation_prompt=False))
        elif text := said.text or said.prompt:
            found.append(tokenizer.encode(text, allow_special=False))
        else:
            trace.bad(number, "has none of text, prompt and messages")
    if untold and not found:
        raise BadInput(
            f"{path}: is a traffic recording without texts: it has lengths and hashes. Record with "
            "--record-texts beside --record-traffic, or pass a text file or prompts as JSON lines"
        )
    trace.refuse_bad(has_rows=bool(found))
    yield from found
