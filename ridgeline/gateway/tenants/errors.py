"""What can go wrong with the store: at start (StoreError), and for one request (StoreUnavailable)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ridgeline.gateway.errors import Unavailable
from ridgeline.storage.errors import StorageError, StorageUnavailable, ValuesRefused


class StoreError(Exception):
    """The store cannot be used as it is; the message says what to do. Ends the start of a gateway."""


class StoreUnavailable(Unavailable):
    """The store could not be reached, or did not answer in time. What it holds is not lost."""

    code = "store_unavailable"

    def __init__(self, cause: BaseException | str) -> None:
        # The cause's kind alone: its text may name hosts, users and values.
        kind = cause if isinstance(cause, str) else type(cause).__name__
        super().__init__(f"the store cannot be reached ({kind}); try again", headers={"retry-after": "1"})


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
