"""Addition: files into a vector store, in batches, so that a run that was stopped is continued by the next.

A file is known by its attributes `path` and `sha256`. Uploads are put into the store while others are still
uploaded, and what a file replaces is removed last: whatever is there when a run stops is found by the next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ridgeline.cli.rag.files import LocalFile, sha256_of
from ridgeline.retrieval.client import RequestFailed, VectorStoreClient

UPLOADS = 4  # at a time
BATCH = 100  # uploads that are put into the store together

StoredFile = Mapping[str, Any]  # as /v1/vector_stores shows it


class Addition:
    """One run of `ridgeline rag add`."""

    def __init__(
        self,
        client: VectorStoreClient,
        store_id: str,
        attributes: Mapping[str, str | float | bool],
        strategy_of: Callable[[str], Mapping[str, Any]],
    ) -> None:
        self._client, self._store_id = client, store_id
        self._attributes, self._strategy_of = attributes, strategy_of
        self._there: dict[str, list[StoredFile]] = {}  # by path; several where a run stopped
        for one in client.files(store_id):
            self._there.setdefault(str(one["attributes"].get("path", "")), []).append(one)
        self._lock = threading.Lock()
        self._uploaded: list[dict[str, Any]] = []  # not in the store yet
        self._batches: list[str] = []
        self._paths: dict[str, str] = {}  # of the files that this run waits for, by id
        self._waiting: list[str] = []  # of these, the ones that an earlier run put into the store
        self._replaced: dict[str, list[StoredFile]] = {}  # by path
        self.skipped = 0

    @property
    def total(self) -> int:
        """Files that this run makes searchable."""
        return len(self._paths)

    def upload(self, files: Sequence[LocalFile], report: Callable[[int], None]) -> None:
        """Upload what is new or has changed, and put it into the store. report: files that were looked at."""
        with ThreadPoolExecutor(UPLOADS) as pool:
            try:
                for number, _ in enumerate(pool.map(self._upload, files), 1):
                    report(number)
                    if len(self._uploaded) >= BATCH:
                        self._put()
                self._put()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                self._put_or_delete()
                raise

    def wait(self, report: Callable[[float, str], None]) -> list[StoredFile]:
        """Until all are done, however: those that could not be read, which are taken out again."""
        client, store_id = self._client, self._store_id
        ended = client.wait_for(store_id, self._waiting, report)
        count = len(self._waiting)
        client.wait(store_id, self._batches, lambda done, work: report(count + done, work))
        failed: list[StoredFile] = [one for one in ended if one["status"] != "completed"]
        failed += client.failed(store_id, self._batches)
        self._remove(failed)
        kept = {self._paths[one["id"]] for one in failed}  # their last readable version stays
        self._remove(old for path, stale in self._replaced.items() if path not in kept for old in stale)
        return failed

    def path_of(self, file: StoredFile) -> str:
        return self._paths[file["id"]]

    def _upload(self, file: LocalFile) -> None:
        content = file.content()
        marks: dict[str, Any] = {"path": file.name, "sha256": sha256_of(content), **self._attributes}
        there = self._there.get(file.name, [])
        fitting = (one for one in there if one["status"] in ("completed", "in_progress"))
        same = next((one for one in fitting if one["attributes"] == marks), None)
        id = self._client.upload(Path(file.name).name, content) if same is None else same["id"]
        with self._lock:
            if stale := [one for one in there if one is not same]:
                self._replaced[file.name] = stale
            if same is None:
                strategy = self._strategy_of(file.name)
                self._uploaded.append({"file_id": id, "attributes": marks, "chunking_strategy": strategy})
                self._paths[id] = file.name
            elif same["status"] == "in_progress":
                self._waiting.append(id)
                self._paths[id] = file.name
            else:
                self.skipped += 1

    def _put(self) -> None:
        taken = list(self._uploaded)
        self._batches += self._client.add(self._store_id, taken)
        with self._lock:
            del self._uploaded[: len(taken)]

    def _put_or_delete(self) -> None:
        """Of a run that ends early: what is uploaded is in the store, or not there at all."""
        try:
            self._put()
        except RequestFailed as error:
            for one in self._uploaded if error.status else ():  # without an answer, a delete has none either
                with contextlib.suppress(RequestFailed):
                    self._client.delete_file(one["file_id"])

    def _remove(self, files: Iterable[StoredFile]) -> None:
        for file in files:
            self._client.remove(self._store_id, file["id"])
            self._client.delete_file(file["id"])
