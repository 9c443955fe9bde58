"""JobQueue: the files that wait for ingest, round robin over vector stores. Pure logic."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set

from ridgeline.retrieval.ingest.records import StoreFile


class JobQueue:
    """Within a vector store, files are taken in the order of their arrival."""

    def __init__(self) -> None:
        self._files: dict[str, deque[StoreFile]] = {}  # by store; the first store's turn is next

    def __iter__(self) -> Iterator[StoreFile]:
        return (file for files in self._files.values() for file in files)

    @property
    def stores(self) -> Set[str]:
        """Those that have a file here."""
        return self._files.keys()

    def add(self, file: StoreFile) -> None:
        self._files.setdefault(file.store_id, deque()).append(file)

    def put_back(self, file: StoreFile) -> None:
        """A file that was taken and is not done: the next of its store."""
        self._files.setdefault(file.store_id, deque()).appendleft(file)

    def take(self, in_work: Set[str]) -> StoreFile | None:
        """The next file. in_work: stores that have one in work; the others come first."""
        if not self._files:
            return None
        store_id = next((one for one in self._files if one not in in_work), next(iter(self._files)))
        files = self._files.pop(store_id)
        file = files.popleft()
        if files:
            self._files[store_id] = files  # its next turn comes after all others
        return file

    def remove(self, store_id: str, file_id: str | None = None) -> list[StoreFile]:
        """The files of a store, or one of them: those that were here."""
        files = self._files.get(store_id, deque())
        removed = [file for file in files if file_id in (None, file.file_id)]
        for file in removed:
            files.remove(file)
        if removed and not files:
            del self._files[store_id]
        return removed
