"""What can go wrong with a database. Callers map these to the errors of their layer."""

from __future__ import annotations


class StorageError(Exception):
    """The database cannot be used as it is. The message says what to do."""


class StorageUnavailable(StorageError):
    """The database cannot be reached, is locked or is full. It holds what it held; try again later.

    The message may name files and users. `cause` is the driver's error.
    """

    def __init__(self, message: str, cause: BaseException) -> None:
        super().__init__(message)
        self.cause = cause


class ValuesRefused(StorageError):
    """The database works and refuses a value. It would refuse the same value again."""
