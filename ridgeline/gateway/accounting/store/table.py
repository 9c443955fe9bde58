"""The table of the ledger, one column for each field of LedgerRow; and what every store of it can do.

Columns are made from the type: a field that is new gets its column when a store is next opened.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from ridgeline.gateway.accounting.row import LedgerRow

TABLE = "ridgeline_ledger"
COLUMNS: tuple[str, ...] = LedgerRow.__struct_fields__
INDEXES = {
    f"{TABLE}_at": "at_ms",
    f"{TABLE}_key": "key_id, at_ms",
    f"{TABLE}_team": "team_id, at_ms",
    f"{TABLE}_model": "model, at_ms",
}
Value = str | int | float | bool | None
Values = tuple[Value, ...]


class LedgerStore(Protocol):
    """Blocking; used by one thread at a time. StoreAway where it cannot be reached: ask it again later."""

    def insert(self, rows: Sequence[LedgerRow]) -> int:
        """Add those that are not there yet, all in one transaction; how many these were. RowsRefused where
        the store does not take one of them."""

    def known(self, request_ids: Sequence[str]) -> set[str]:
        """Which of them have their row."""

    def query(self, statement: str, values: Iterable[Value] = ()) -> list[tuple[Any, ...]]:
        """Rows of a SELECT, whose values are written ? in their order."""

    def remove_before(self, at_ms: int, limit: int) -> int:
        """Remove at most `limit` rows that are older; how many there were."""

    def close(self) -> None: ...


def definitions(type_names: dict[type, str]) -> dict[str, str]:
    """Each column's type and constraints, in the words of one database."""
    hints = get_type_hints(LedgerRow)
    return {name: _definition(hints[name], type_names) for name in COLUMNS}


def _definition(hint: Any, type_names: dict[type, str]) -> str:
    if get_origin(hint) is Literal:
        hint = str
    if get_origin(hint) in (Union, types.UnionType):
        return type_names[next(part for part in get_args(hint) if part is not types.NoneType)]
    default = {str: "''", bool: "false"}.get(hint, "0")
    return f"{type_names[hint]} NOT NULL DEFAULT {default}"
