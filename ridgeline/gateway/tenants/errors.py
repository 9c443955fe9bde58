"""Errors of the store: at start (StoreError), and for one request (StoreUnavailable)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ridgeline.gateway.errors import Unavailable
from ridgeline.storage.errors import StorageError, StorageUnavailable, ValuesRefused


class StoreError(Exception):
    """The store cannot be used; the message says what to do. The gateway does not start."""


class StoreUnavailable(Unavailable):
    """The store is unreachable, or did not answer within the time limit. Its data is not lost."""

    code = "store_unavailable"

    def __init__(self, cause: BaseException | str) -> None:
        # Only the cause's class: its message may name hosts, users and values.
        kind = cause if isinstance(cause, str) else type(cause).__name__
        super().__init__(f"the store is unreachable ({kind}); try again", headers={"retry-after": "1"})


@contextmanager
def store_errors() -> Iterator[None]:
    """Errors of the database as errors of the gateway's store."""
    try:
        yield
    except StorageUnavailable as error:
        raise StoreUnavailable(error.cause) from error
    except ValuesRefused:  # a fault of the gateway's own: the request fails with a 500
        raise
    except StorageError as error:
        raise StoreError(f"the store: {error}") from error
