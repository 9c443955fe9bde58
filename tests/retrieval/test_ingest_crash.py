"""A process that is killed while it ingests: the next one goes on, nothing is lost and nothing doubled."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from ridgeline.retrieval.chunking.strategy import chunk
from ridgeline.retrieval.ingest.records import Page
from ridgeline.retrieval.types import Namespace
from tests.patience import PATIENCE_S
from tests.retrieval.ingest_process import STORE_ID, STRATEGY, opened
from tests.retrieval.word_embedder import WordEmbedder

ROOT = Path(__file__).resolve().parents[2]


def text_of(number: int) -> str:
    """Most files are short; every tenth is embedded in several parts, which the journal keeps."""
    words = random.Random(number)
    count = 1500 if number % 10 == 0 else 40
    return " ".join(f"word{words.randrange(500)}" for _ in range(count)) + f" file{number}.\n"


def begun(folder: Path, pause_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.retrieval.ingest_process", str(folder), str(pause_s)]
    return subprocess.Popen(command, cwd=ROOT)


def done(folder: Path) -> int:
    """What the journal holds as done, read from outside."""
    try:
        with sqlite3.connect(folder / "catalog.sqlite", timeout=60) as sql:
            found = sql.execute("SELECT count(*) FROM store_files WHERE status = 'completed'").fetchone()[0]
            parts = sql.execute("SELECT count(*) FROM embedded_parts").fetchone()[0]
        return int(found) + int(parts)
    except sqlite3.OperationalError:
        return 0  # not made yet


def killed_again_and_again(folder: Path, kills: int, step: int, pause_s: float) -> int:
    """Kill a process each time it has done `step` more; how often it was alive to be killed."""
    killed = 0
    for _ in range(kills):
        process = begun(folder, pause_s)
        target, deadline = done(folder) + step, time.monotonic() + PATIENCE_S
        while process.poll() is None and done(folder) < target:
            assert time.monotonic() < deadline, "the process makes no progress"
            time.sleep(0.001)
        killed += process.poll() is None
        process.kill()
        process.wait()
    return killed


async def check_all_there_once(folder: Path, count: int) -> None:
    catalog, store = opened(folder)
    await catalog.open()
    await store.open()
    embedder, namespace = WordEmbedder(), Namespace("", STORE_ID)
    counts, _ = await catalog.counts(STORE_ID)
    assert (counts.completed, counts.total) == (count, count)
    expected, listed = 0, Counter[str]()
    for number in range(count):
        text = text_of(number)
        spans = chunk(text, embedder.tokenize(text).starts, STRATEGY)
        name = f"{number:05}.txt"
        document = await store.document(namespace, name)
        assert document is not None
        assert document.text == text
        chunks = await store.chunks(namespace, name)
        assert [(one.begin, one.end) for one in chunks] == spans
        assert all(one.text == text[one.begin : one.end] for one in chunks)
        expected += len(spans)
        listed.update(one.id for one in chunks)
    info = await store.describe(namespace)
    assert (info.documents, info.chunks) == (count, expected)
    assert set(listed.values()) == {1}
    files = await catalog.files(STORE_ID, Page(limit=count))
    assert sum(file.chunks for file in files) == expected
    await catalog.close()
    await store.close()


def prepared(folder: Path, count: int) -> Path:
    (folder / "files").mkdir()
    for number in range(count):
        (folder / "files" / f"{number:05}.txt").write_text(text_of(number))
    return folder


async def test_a_killed_ingest_loses_and_doubles_nothing(tmp_path: Path) -> None:
    folder = prepared(tmp_path, 60)
    assert killed_again_and_again(folder, kills=3, step=12, pause_s=0.02) >= 2
    assert begun(folder, 0.0).wait(PATIENCE_S) == 0
    await check_all_there_once(folder, 60)


@pytest.mark.slow
async def test_a_thousand_files_survive_twenty_kills(tmp_path: Path) -> None:
    folder = prepared(tmp_path, 1000)
    assert killed_again_and_again(folder, kills=20, step=50, pause_s=0.01) >= 15
    assert begun(folder, 0.0).wait(10 * PATIENCE_S) == 0
    await check_all_there_once(folder, 1000)
