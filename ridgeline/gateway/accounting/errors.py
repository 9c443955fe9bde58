"""Errors of the ledger outside a request: its folder, its store, a report."""

from __future__ import annotations


class LedgerError(Exception):
    """The message says what to do; the command line prints it as one line."""


class StoreAway(LedgerError):
    """The store is unreachable, locked or full: try again later."""


class RowsRefused(LedgerError):
    """The store rejected these rows; a retry would fail again."""
