"""PodWatch: the pods of one fleet, kept up to date by one list and one watch of the Kubernetes API.

A watch that ends is continued from its last version; if the API has dropped that version (410), it begins
with a new list. `get` answers from memory, and asks the API if memory may be old or lacks the pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from time import monotonic

from ridgeline.fleet.substrates.kubernetes_api import ApiError, KubernetesApi, Object
from ridgeline.fleet.substrates.kubernetes_pods import FLEET, SELECT, label
from ridgeline.proxy.backoff import backoff_s

FIRST_LIST_S = 15.0
STALE_S = 20.0  # seconds without a watch after which `get` asks the API
GONE = 410
FIRST_MS, LONGEST_MS = 250.0, 10_000.0  # pauses between tries

logger = logging.getLogger(__name__)


class PodWatch:
    def __init__(self, api: KubernetesApi, fleet: str) -> None:
        self._api, self._select = api, f"{SELECT},{FLEET}={label(fleet)}"
        self.pods: dict[str, Object] = {}
        self.error = ""  # why the watch does not run; empty if it does
        self.lists = 0
        self._version = ""
        self._listed = asyncio.Event()
        self._lost_at: float | None = monotonic()
        self._task = asyncio.create_task(self._run())

    async def get(self, name: str) -> Object | None:
        """A pod, or None if there is no such pod. ApiError: the API cannot be reached."""
        await self._first_list()
        found = self.pods.get(name)
        if found is not None and (self._lost_at is None or monotonic() - self._lost_at < STALE_S):
            return found
        try:
            return await self._api.call("GET", f"{self._api.pods}/{name}")
        except ApiError as error:
            if error.status == 404:
                self.pods.pop(name, None)
                return None
            raise

    async def all(self) -> list[Object]:
        """List every pod of the fleet with a call of the API."""
        return list((await self._list())[0].values())

    def put(self, made: Object) -> None:
        """Add a pod that was just made: its event is still on the way."""
        self.pods.setdefault(made["metadata"]["name"], made)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _first_list(self) -> None:
        try:
            async with asyncio.timeout(FIRST_LIST_S):
                await self._listed.wait()
        except TimeoutError:
            raise ApiError(0, "", self.error or "the Kubernetes API has not answered yet") from None

    async def _run(self) -> None:
        rng, failures = random.Random(), 0
        while True:
            began = monotonic()
            try:
                if not self._version:
                    self.pods, self._version = await self._list()
                    self.lists += 1
                    self._listed.set()
                self._lost_at, self.error = None, ""
                await self._follow()
                failures = 0
            except (ApiError, KeyError, TypeError) as error:
                if isinstance(error, ApiError) and error.status == GONE:
                    self._version = ""
                else:
                    malformed = f"the Kubernetes API sent a malformed answer: {error!r}"
                    self.error = str(error) if isinstance(error, ApiError) else malformed
                    if self._lost_at is None:
                        self._lost_at = monotonic()
                        logger.warning("the watch of the replicas' pods failed: %s", self.error)
            if self._lost_at is not None or monotonic() - began < 1.0:
                await asyncio.sleep(backoff_s(FIRST_MS, LONGEST_MS, failures, rng))
                failures = min(failures + 1, 16)

    async def _list(self) -> tuple[dict[str, Object], str]:
        found = await self._api.call("GET", self._api.pods, query={"labelSelector": self._select})
        pods = {one["metadata"]["name"]: one for one in found.get("items", [])}
        return pods, str(found["metadata"]["resourceVersion"])

    async def _follow(self) -> None:
        query = {"labelSelector": self._select, "resourceVersion": self._version}
        async for event in self._api.watch(self._api.pods, query):
            changed = event["object"]
            if event["type"] == "ERROR":
                code = int(changed.get("code", 0))
                raise ApiError(code, str(changed.get("reason", "")), str(changed.get("message", "")))
            self._version = changed["metadata"]["resourceVersion"]
            if event["type"] == "DELETED":
                self.pods.pop(changed["metadata"]["name"], None)
            elif event["type"] in ("ADDED", "MODIFIED"):
                self.pods[changed["metadata"]["name"]] = changed
