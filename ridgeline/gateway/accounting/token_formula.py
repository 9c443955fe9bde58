"""Estimates token counts that no upstream has reported. Pure functions over bytes.

docs/gateway-accounting.md has the formula. It counts slightly high, because budgets use it. Used for openings
before a request is sent, and for rows without reported usage.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

CountTokens = Callable[[bytes], int]  # of a JSON value or of UTF-8 text

TOKENS_PER_S = 100  # of one answer whose text was never seen: faster than most hosted models write
TOKENS_PER_PART = 1600  # of an image, a sound or a file within a prompt
PER_LETTER, PER_DIGIT, PER_SIGN = 1 / 4, 1.0, 2 / 3  # ASCII: letters and spaces, digits, all others
PER_TWO_BYTES, PER_MORE_BYTES = 0.4, 1.0  # characters of two bytes of UTF-8, and of three or four
SHORTEST_BLOB = 1024  # characters of base64
LARGEST_READ = 256 << 10  # largest JSON value in bytes that is read whole; longer ones are sampled
SAMPLES, SAMPLE_BYTES = 64, 4096
PIECE_BYTES = 32 << 10  # of an answer that is weighed step by step

# The fields that an upstream reads as its prompt, of every endpoint.
PROMPT_FIELDS = (
    "messages", "system", "prompt", "suffix", "input", "instructions", "tools", "functions",
    "response_format", "text", "documents", "query", "queries", "text_1", "text_2", "texts",
)  # fmt: skip

_LETTERS = (string.ascii_letters + " \t\r\n").encode()
_DIGITS = string.digits.encode()
_CONTINUED = bytes(range(0x80, 0xC0))
_TWO_BYTES = bytes(range(0xC0, 0xE0))
_MORE_BYTES = bytes(range(0xE0, 0x100))
_BASE64 = re.compile(rb"[A-Za-z0-9+/=_-]{64}")
_BASE64_RUN = re.compile(rb"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/=_-]{256,}")
_BLOB_MARK = re.compile(rb';base64,|"data"')
_NARROW_ESCAPE = re.compile(rb"\\u0[0-9A-Fa-f]{3}")
_WIDE_ESCAPE = re.compile(rb"\\u[0-9A-Fa-f]{4}")
_PART = re.compile(
    rb'"type"\s*:\s*"(?:image|image_url|input_image|input_audio|audio_url|video_url|file|input_file|document)"'
)
_IDS = re.compile(rb"\s*+\[[\s\[]*+\d")
_LONGEST_INDENT = 256  # bytes before the first token id
# Texts of an answer or of a stream's events, in every dialect: what stands before one, and its characters.
_BEFORE_TEXT = (
    rb'"(?:content|text|delta|reasoning_content|reasoning|refusal|arguments|thinking|partial_json)"'
    rb'\s{0,64}:\s{0,64}"'
)
_CHARACTERS = rb'(?:[^"\\]++|\\.)*+'
_LONGEST_BEFORE_TEXT = 256  # bytes
_QUOTE = ord('"')
_before_text = re.compile(_BEFORE_TEXT)
_characters = re.compile(_CHARACTERS, re.DOTALL)
TEXTS = re.compile(_BEFORE_TEXT + b"(" + _CHARACTERS + b")", re.DOTALL)


def weight(text: bytes) -> float:
    """Tokens of a text, not rounded. JSON's escapes count as the characters they stand for."""
    if b"\\u" in text:
        text = _WIDE_ESCAPE.sub("中".encode(), _NARROW_ESCAPE.sub("д".encode(), text))
    size = len(text)
    letters = size - len(text.translate(None, _LETTERS))
    digits = size - len(text.translate(None, _DIGITS))
    two = more = continued = 0
    if not text.isascii():
        two, more, continued = (
            size - len(text.translate(None, one)) for one in (_TWO_BYTES, _MORE_BYTES, _CONTINUED)
        )
    signs = size - letters - digits - two - more - continued
    ascii_tokens = letters * PER_LETTER + digits * PER_DIGIT + signs * PER_SIGN
    return ascii_tokens + two * PER_TWO_BYTES + more * PER_MORE_BYTES


def text_tokens(text: bytes) -> int:
    return math.ceil(weight(text))


def prompt_tokens(fields: Mapping[str, msgspec.Raw], count: CountTokens = text_tokens) -> int:
    """Input tokens of a JSON request, by `count` for its texts."""
    tokens = 0
    for name in PROMPT_FIELDS:
        value = fields.get(name)
        if value is not None:
            tokens += _value_tokens(bytes(value), count)
    return tokens


def answer_tokens(body: bytes, count: CountTokens = text_tokens) -> int:
    """Output tokens of a whole answer, or of a stream's events."""
    return sum(count(text) for text in texts_of(body)) or count(body)


def answer_tokens_so_far(body: bytes) -> Iterator[int]:
    """`answer_tokens` by the formula, in steps of at most `PIECE_BYTES`; each yields the total so far."""
    tokens, text, at, is_in_text = 0, 0.0, 0, False
    while at < len(body):
        end = min(at + PIECE_BYTES, len(body))
        while at < end:
            if not is_in_text:
                found = _before_text.search(body, at, end)
                if found is None:
                    at = end if end == len(body) else max(at, end - _LONGEST_BEFORE_TEXT)
                    break
                at, text, is_in_text = found.end(), 0.0, True
            stop = _end_of_text(body, at, end)
            text += weight(body[at:stop])
            at = stop
            if at == len(body) or body[at] == _QUOTE:
                tokens, is_in_text = tokens + math.ceil(text), False
            else:
                break  # the text goes on in the next piece
        yield tokens
    if not tokens:
        for at in range(0, len(body), PIECE_BYTES):
            tokens += text_tokens(body[at : at + PIECE_BYTES])
            yield tokens


def _end_of_text(body: bytes, at: int, end: int) -> int:
    """Where a text before `end` stops: at its quote or at `end`, not inside an escape that `weight` reads."""
    found = _characters.match(body, at, end)
    assert found is not None  # it matches nothing too
    stop = found.end()
    if end == len(body):
        return stop if stop < end and body[stop] == _QUOTE else end
    if stop < end:
        return stop
    escape = body.rfind(b"\\u", max(at, stop - 5), stop)
    return stop if escape < 0 else escape


def texts_of(body: bytes) -> Iterable[bytes]:
    found: Iterable[bytes] = TEXTS.findall(body)
    return found


def unseen_tokens(seconds: float, limit: int | None, answers: int = 1) -> int:
    """Output tokens of an answer without text: what could be generated in its time."""
    written = math.ceil(max(seconds, 0.0) * TOKENS_PER_S)
    return (written if limit is None else min(written, limit)) * answers


def _value_tokens(value: bytes, count: CountTokens) -> int:
    if _IDS.match(value, 0, _LONGEST_INDENT):
        return value.count(b",") + 1  # token ids
    if len(value) > LARGEST_READ:
        return _sampled_tokens(value)
    pieces = list(_without_blobs(value))
    parts = sum(len(_PART.findall(piece)) for piece in pieces)
    return sum(count(piece) for piece in pieces) + parts * TOKENS_PER_PART


def _sampled_tokens(value: bytes) -> int:
    """From samples, so that a value of any size takes a few milliseconds. A run of base64 is one part."""
    step = len(value) // SAMPLES
    texts, parts, was_blob = 0.0, 0, False
    for at in range(0, step * SAMPLES, step):
        text = _BASE64_RUN.sub(b"", value[at : at + SAMPLE_BYTES])
        is_blob = len(text) < SAMPLE_BYTES // 2
        parts += is_blob and not was_blob
        texts += weight(text)
        was_blob = is_blob
    return math.ceil(texts * step / SAMPLE_BYTES) + parts * TOKENS_PER_PART


def _without_blobs(value: bytes) -> Iterator[bytes]:
    """The text around base64. A blob follows `;base64,` or the key "data", and holds no quote."""
    start = 0
    for mark in _BLOB_MARK.finditer(value):
        if mark.start() < start:
            continue
        at = mark.start() + 6
        begin = value.find(b",", at, at + 4) + 1 or value.find(b'"', at, at + 8) + 1
        if not begin or not _BASE64.match(value, begin):
            continue
        end = value.find(b'"', begin)  # near, or that of a blob: no byte is searched twice
        if end - begin >= SHORTEST_BLOB:
            yield value[start:begin]
            start = end
    yield value[start:]
