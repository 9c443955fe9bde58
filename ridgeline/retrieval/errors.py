"""Errors of retrieval. The layer above maps them to HTTP once."""

from __future__ import annotations


class RetrievalError(Exception):
    """Retrieval cannot do what was asked. The message says why and what to do."""


class BadInput(RetrievalError):
    """A value of the request is wrong: a 400 that names `field`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NamespaceNotFound(RetrievalError):
    """The tenant has no such vector store: a 404."""


class SpecMismatch(RetrievalError):
    """The vectors or the embedding model are not those that the namespace was created with."""


class StoreUnavailable(RetrievalError):
    """The store cannot be reached now. It holds what it held; try again later: a 503."""
