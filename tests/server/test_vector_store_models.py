"""A server that starts again with another embedding model of as many dimensions, on the same stores."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from ridgeline.models.files.pull import ensure
from tests.conftest import await_ready, start_server
from tests.patience import PATIENCE_S
from tests.server.test_vector_stores import COFFEE, TEA, added, refused, settled, uploaded

FIRST = "all-minilm-l6-v2"


@contextmanager
def served(state: Path, model: str, *flags: str) -> Iterator[openai.OpenAI]:
    started = start_server(
        state.parent / "log", "--state-dir", str(state), "--deterministic", *flags, models=(model,)
    )
    try:
        await_ready(started)
        url = f"{started.base_url}/v1"
        with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=PATIENCE_S) as client:
            yield client
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(PATIENCE_S) == 0, started.log.read_text()
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


@pytest.fixture
def other_model(tmp_path: Path) -> str:
    """The same files by another name: what differs is what a store records."""
    folder = tmp_path / "other-model"
    folder.mkdir()
    for file in ensure(FIRST).path.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    return str(folder)


def test_vectors_of_two_models_are_never_mixed_or_compared(tmp_path: Path, other_model: str) -> None:
    state = tmp_path / "state"
    with served(state, FIRST, "--served-model-name", "embedder") as client:
        store = client.vector_stores.create(name="drinks").id
        tea = added(client, store, "tea.md", TEA)
        assert settled(client, store, tea).status == "completed"
    text_only: Any = {"hybrid_search": {"embedding_weight": 0, "text_weight": 1}}
    # A served name does not decide: another model under the first one's name is another model.
    with served(state, other_model, "--served-model-name", FIRST) as client:
        search, files = client.vector_stores.search, client.vector_stores.files
        coffee = uploaded(client, "coffee.txt", COFFEE)
        for call in (
            lambda: search(store, query="tea"),
            lambda: files.create(store, file_id=coffee),
            lambda: client.vector_stores.file_batches.create(store, file_ids=[coffee]),
        ):
            message = refused(call, 409, None)
            assert f"were made with '{FIRST}'" in message
            assert "model is 'other-model'" in message
        assert [one.file_id for one in search(store, query="oxidised", ranking_options=text_only)] == [tea]
        assert client.vector_stores.retrieve(store).file_counts.total == 1
        fresh = client.vector_stores.create(file_ids=[coffee]).id
        assert [one.file_id for one in search(fresh, query="coffee")] == [coffee]
