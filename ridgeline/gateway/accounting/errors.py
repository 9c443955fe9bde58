"""What can go wrong with the ledger outside a request: its folder, its store, a report that was asked for."""

from __future__ import annotations


class LedgerError(Exception):
    """The message says what to do; the command line prints it as one line."""


class StoreAway(LedgerError):
    """The store cannot be reached, is locked or is full: what was asked may be asked again later."""


class RowsRefused(LedgerError):
    """The store is there and does not take these rows; asked again, it would refuse them again."""
