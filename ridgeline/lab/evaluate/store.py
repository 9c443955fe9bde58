"""ResultsFolder: the outcomes of one subject, one line per item, written as they come. A rerun continues.

    results.jsonl   a head (subject, engine, identity, version), then an outcome per line
    logits/         for texts: tokens and top tokens, one file per item

An outcome counts only for the item it was made for (its digest). A line cut by a crash is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import numpy as np

from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate.scoring.outcome import Outcome
from ridgeline.lab.evaluate.statistics.divergence import TokenScores
from ridgeline.version import __version__

RESULTS = "results.jsonl"
FORMAT = 2


class Head(msgspec.Struct, frozen=True):
    """The subject of the results. Another model under the same name or address has another identity."""

    subject: str
    engine: str = ""  # backend and formats; "" for a server
    identity: str = ""  # a server's model, endpoint and way of scoring; a file's size and time
    version: str = __version__
    format: int = FORMAT

    @property
    def words(self) -> str:
        parts = (self.engine or "a server", self.identity, f"ridgeline {self.version}")
        return f"{self.subject} ({'; '.join(part for part in parts if part)})"


class ResultsFolder:
    """A context manager. Raises BadInput if the folder has results of another subject."""

    def __init__(self, folder: Path, head: Head) -> None:
        self.folder = folder
        self._head = head
        self._outcomes: dict[tuple[str, str, str], Outcome] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> ResultsFolder:
        path = self.folder / RESULTS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = self._read(path) if path.is_file() else 0
            self._file = path.open("ab")
        except OSError as error:
            raise BadInput(f"{self.folder}: results cannot be kept there: {error.strerror}") from error
        self._file.truncate(kept)
        self._file.seek(0, os.SEEK_END)
        if not kept:
            self._write(self._head)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def outcome(self, key: tuple[str, str, str]) -> Outcome | None:
        return self._outcomes.get(key)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Keep them, and write them through: what was paid for survives a crash."""
        assert self._file is not None
        for outcome in outcomes:
            self._outcomes[outcome.key] = outcome
            self._write(outcome)
        self._file.flush()

    def has_scores(self, digest: str, top: int) -> bool:
        """Whether the text's top tokens are stored, and enough of them."""
        try:
            with np.load(self._scores_file(digest)) as stored:
                return "prefix" in stored and int(stored["top_ids"].shape[1]) >= top
        except (OSError, ValueError, KeyError):
            return False

    def add_scores(self, digest: str, scores: TokenScores) -> None:
        path = self._scores_file(digest)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                tokens=scores.tokens,
                logprobs=scores.logprobs,
                top_ids=scores.top_ids,
                top_logprobs=scores.top_logprobs,
                prefix=scores.prefix,
            )
        partial.replace(path)

    def scores(self, digest: str) -> TokenScores:
        with np.load(self._scores_file(digest)) as stored:
            return TokenScores(
                stored["tokens"],
                stored["logprobs"],
                stored["top_ids"],
                stored["top_logprobs"],
                int(stored["prefix"]),
            )

    def _scores_file(self, digest: str) -> Path:
        return self.folder / "logits" / f"{digest}.npz"

    def _write(self, record: Head | Outcome) -> None:
        assert self._file is not None
        self._file.write(msgspec.json.encode(record) + b"\n")

    def _read(self, path: Path) -> int:
        """Bytes of whole, valid lines."""
        kept = 0
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True)):
            if not line.endswith(b"\n"):
                break
            try:
                if number == 0:
                    self._check_head(msgspec.json.decode(line, type=Head), path)
                else:
                    outcome = msgspec.json.decode(line, type=Outcome)
                    self._outcomes[outcome.key] = outcome
            except msgspec.DecodeError as error:
                raise BadInput(f"{path}, line {number + 1}: not a result: {error}") from None
            kept += len(line)
        return kept

    def _check_head(self, head: Head, path: Path) -> None:
        if head != self._head:
            raise BadInput(
                f"{path} has results of {head.words}, not of {self._head.words}; "
                "give another --out, or remove it"
            )
