"""How much of each prompt an engine's prefix cache could reuse, what breaks the prefix, and how much would be
shared if variable content came last. Pure functions; `ridgeline lint-prompts` prints their report.

A prefix is shared in whole blocks: one changed token at the front invalidates everything after it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ridgeline.web.prompt_files import Prompt, Template

BLOCK_TOKENS = 16
CHARS_PER_TOKEN = 4
ANCHOR = 24  # equal characters after which two texts count as aligned again
WINDOW = 512  # most characters of a variable
MAX_GAPS = 64  # variables looked for in one prompt
EXAMPLE_CHARS = 40

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "timestamp",
            r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?|\d\d?:\d\d(?::\d\d)?"
            rf"|\d\d?[./]\d\d?[./]\d{{2,4}}|{_MONTH} \d\d?(?:, \d{{4}})?|\d\d? {_MONTH}(?: \d{{4}})?"
            r"|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|\b1[6-9]\d{8}(?:\d{3})?\b",
        ),
        ("uuid", r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"),
        ("id", r"\b(?=[0-9a-zA-Z_-]*\d)(?=[0-9a-zA-Z_-]*[a-zA-Z])[0-9a-zA-Z_-]{8,}\b"),
        ("e-mail", r"[\w.+-]+@[\w-]+\.[\w.]+"),
        ("number", r"\d[\d.,]*"),
        ("name", r"\b[A-Z][\w'’-]+(?: [A-Z][\w'’-]+)*"),
    )
)
# The kind of a template's variable, by its name.
_CALLED = (
    ("timestamp", ("date", "time", "now", "today", "timestamp")),
    ("uuid", ("uuid", "guid", "session", "request_id", "trace")),
    ("name", ("name", "user", "customer", "author", "email")),
    ("number", ("count", "number", "num", "id", "index")),
)

Encode = Callable[[Prompt], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Breaker:
    kind: str  # timestamp, uuid, id, e-mail, number, name, tool order, JSON key order, text
    where: str
    at_token: int  # median position of the break in the prompt
    requests: int
    tokens_lost: int  # shared if this came last
    example: str


@dataclass(frozen=True, slots=True)
class Report:
    requests: int
    tokens: int
    tokens_shared: int
    tokens_shared_ideal: int
    measured_in: str
    breakers: tuple[Breaker, ...]

    @property
    def share(self) -> float:
        return self.tokens_shared / self.tokens if self.tokens else 0.0

    @property
    def share_ideal(self) -> float:
        return self.tokens_shared_ideal / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class TemplateReport:
    source: str
    tokens: int  # of fixed text
    tokens_before: int  # of it, before the first variable
    breaker: str
    called: str

    @property
    def share(self) -> float:
        return self.tokens_before / self.tokens if self.tokens else 1.0


@dataclass(slots=True)
class _Break:
    kind: str
    where: str
    at_token: int
    lost: int
    example: str


def lint(prompts: Iterable[Prompt], encode: Encode | None = None) -> Report:
    """encode: gives a prompt's token ids; without it, four characters count as one token."""
    block = BLOCK_TOKENS if encode is not None else BLOCK_TOKENS * CHARS_PER_TOKEN
    per_token = 1 if encode is not None else CHARS_PER_TOKEN
    tree = _Tree(block)
    seen: list[tuple[Prompt, Sequence[object]]] = []
    breaks: list[_Break] = []
    total = shared = shared_ideal = 0
    for prompt in prompts:
        units: Sequence[object] = prompt.text if encode is None else encode(prompt)
        now, partner = tree.add(units, len(seen))
        ideal = now
        if seen:
            other, theirs = seen[partner if partner is not None else _alike(prompt, seen)]
            text = prompt.text
            rate = len(units) / max(len(text), 1)  # units for each character
            common = int(_common(prompt.ideal, other.ideal) * rate)
            ideal = max(now, min(common, len(units)) // block * block)
            if ideal > now:
                at = _equal(units, theirs, 0, 0) // per_token
                breaks.append(_break(prompt, other, at, (ideal - now) // per_token))
        total += len(units)
        shared += now
        shared_ideal += ideal
        seen.append((prompt, units))
    return Report(
        len(seen),
        total // per_token,
        shared // per_token,
        shared_ideal // per_token,
        "tokens" if encode is not None else "characters / 4",
        _grouped(breaks),
    )


def lint_template(template: Template) -> TemplateReport:
    fixed = len(template.text) - sum(len(place) for _, place in template.places)
    if not template.places:
        return TemplateReport(template.source, fixed // CHARS_PER_TOKEN, fixed // CHARS_PER_TOKEN, "", "")
    position, called = template.places[0]
    return TemplateReport(
        template.source,
        fixed // CHARS_PER_TOKEN,
        position // CHARS_PER_TOKEN,
        _kind_of_variable(called),
        called[:EXAMPLE_CHARS],
    )


class _Tree:
    """Blocks of all prompts so far, as in a prefix cache without eviction."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._children: dict[tuple[int, object], int] = {}
        self._latest: list[int] = [0]  # by node: the last prompt that passed it

    def add(self, units: Sequence[object], number: int) -> tuple[int, int | None]:
        """The number of units in whole blocks that are already cached, and one prompt that shares them."""
        node = shared = 0
        partner: int | None = None
        known = True
        for start in range(0, len(units) - self._block + 1, self._block):
            piece = units[start : start + self._block]
            step = (node, piece if isinstance(piece, str) else tuple(piece))
            child = self._children.get(step)
            if child is None:
                known = False
                child = self._children[step] = len(self._latest)
                self._latest.append(number)
            if known:
                shared = start + self._block
                partner = self._latest[child]
            self._latest[child] = number
            node = child
        return shared, partner


def _alike(prompt: Prompt, seen: list[tuple[Prompt, Sequence[object]]]) -> int:
    """The last prompt with the same pieces, of the last few; else the last."""
    shape = [piece.where for piece in prompt.pieces]
    for back in range(1, min(len(seen), 32) + 1):
        if [piece.where for piece in seen[-back][0].pieces] == shape:
            return len(seen) - back
    return len(seen) - 1


def _common(one: str, other: str) -> int:
    """Characters that both share, in the same order, in runs too long for chance."""
    here = there = common = 0
    for _ in range(MAX_GAPS):
        run = _equal(one, other, here, there)
        if run >= ANCHOR or here == 0:
            common += run
        here, there = here + run, there + run
        again = _together_again(one, other, here, there)
        if again is None:
            return common
        here, there = again
    return common


def _equal(one: Sequence[object], other: Sequence[object], here: int, there: int) -> int:
    """Length of the common run from these offsets."""
    low, high = 0, min(len(one) - here, len(other) - there)
    while low < high:
        middle = (low + high + 1) // 2
        if one[here + low : here + middle] == other[there + low : there + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _together_again(one: str, other: str, here: int, there: int) -> tuple[int, int] | None:
    window = other[there : there + WINDOW + ANCHOR]
    for skip in range(min(WINDOW, len(one) - here - ANCHOR) + 1):
        found = window.find(one[here + skip : here + skip + ANCHOR])
        if found >= 0:
            return here + skip, there + found
    return None


def _break(prompt: Prompt, other: Prompt, at_token: int, lost: int) -> _Break:
    one, two = prompt.text, other.text
    position = _equal(one, two, 0, 0)
    where = prompt.where(position)
    kind = _order(prompt, other, where)
    if not kind:
        found = (
            name for name, form in _KINDS if _covers(form, one, position) and _covers(form, two, position)
        )
        kind = next(found, "text")
    example = f"{_variable(one, position)!r} / {_variable(two, position)!r}"
    return _Break(kind, where, at_token, lost, example)


def _order(prompt: Prompt, other: Prompt, where: str) -> str:
    """Which order differs, if nothing else does."""
    here = [piece.canonical for piece in prompt.pieces if piece.where == where]
    there = [piece.canonical for piece in other.pieces if piece.where == where]
    if here == there:
        return "JSON key order"
    return "tool order" if where == "tools" and sorted(here) == sorted(there) else ""


def _covers(pattern: re.Pattern[str], text: str, position: int) -> bool:
    start = max(0, position - 48)
    return any(
        found.start() + start <= position <= found.end() + start
        for found in pattern.finditer(text[start : position + 64])
    )


def _variable(text: str, position: int) -> str:
    """The words around the position where two texts diverge."""
    start = max(text.rfind(" ", 0, position), text.rfind("\n", 0, position)) + 1
    shown = text[start : start + EXAMPLE_CHARS].split("\n")[0]
    return shown if len(shown) < EXAMPLE_CHARS else shown[:-1] + "…"


def _kind_of_variable(called: str) -> str:
    lower = called.lower()
    return next((kind for kind, words in _CALLED if any(word in lower for word in words)), "text")


def _grouped(breaks: list[_Break]) -> tuple[Breaker, ...]:
    groups: dict[tuple[str, str], list[_Break]] = defaultdict(list)
    for each in breaks:
        groups[each.kind, each.where].append(each)
    rows = [
        Breaker(
            kind,
            where,
            sorted(each.at_token for each in members)[len(members) // 2],
            len(members),
            sum(each.lost for each in members),
            members[0].example,
        )
        for (kind, where), members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.tokens_lost))
