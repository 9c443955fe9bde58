"""Parses texts such as `lognormal:200,1.0`: a kind, and numbers after a colon. For lengths and arrivals.

Every error names the flag or key, and shows the syntax.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from ridgeline.lab.errors import BadInput


def split_kind(text: str) -> tuple[str, str]:
    """`gamma:2` → ("gamma", "2"); the part after the colon may be empty."""
    kind, _, rest = text.strip().partition(":")
    return kind.strip().lower(), rest.strip()


def figures(text: str, field: str, whole: str, form: str) -> list[float]:
    """The numbers of `text`, as many as `form` names (`MEAN,SIGMA`); `whole` is shown in errors."""
    names = form.split(",")
    parts = [part.strip() for part in text.split(",")] if text else []
    if len(parts) != len(names):
        raise BadInput(f"{field}: {whole!r} needs {form} after the colon")
    return [_figure(part, name, field, whole) for part, name in zip(parts, names, strict=True)]


def unknown_kind(kind: str, known: Iterable[str], field: str) -> BadInput:
    names = list(known)
    near = difflib.get_close_matches(kind, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
    return BadInput(f"{field}: {kind!r} is unknown; {hint}")


def _figure(text: str, name: str, field: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadInput(f"{field}: {name} of {whole!r} is {text!r}, not a number") from None
    if not math.isfinite(value):
        raise BadInput(f"{field}: {name} of {whole!r} must be a finite number")
    return value
