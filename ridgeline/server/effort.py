"""Reasoning efforts and the number of thinking tokens that each allows.

The table is the default of --reasoning-budget, which replaces single entries of it. Pure data, read by the
configuration and by `answering.thinking`.
"""

from __future__ import annotations

from ridgeline.options import OptionError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
DEFAULT = "default"  # the entry for requests that name neither an effort nor a budget
DEFAULT_BUDGETS: dict[str, int | None] = {  # None: no limit
    "none": 0,
    "minimal": 512,
    "low": 1024,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
    DEFAULT: None,
}


def effort_budgets(text: str | None) -> dict[str, int | None]:
    """The table with the entries that `low=1024,high=none` replaces. Raises OptionError.

    A number alone is the default entry, -1 no limit: so llama.cpp writes it.
    """
    budgets = dict(DEFAULT_BUDGETS)
    for entry in (text or "").split(",") if text else ():
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals and (name == "-1" or _is_count(name)):
            name, value = DEFAULT, "none" if name == "-1" else name
        if name not in budgets or name == "none" or not (value == "none" or _is_count(value)):
            raise OptionError(
                f"reasoning_budget {entry.strip()!r}: write EFFORT=TOKENS or EFFORT=none, with EFFORT one of "
                f"{', '.join(known for known in budgets if known != 'none')}"
            )
        budgets[name] = None if value == "none" else int(value)
    return budgets


def _is_count(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= 9
