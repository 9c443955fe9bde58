"""KubernetesSubstrate: replicas are pods, made and deleted through the Kubernetes API.

A pod's name follows from the fleet and the replica, so that a start that is sent twice makes one pod. Its
environment is a Secret that belongs to the pod. Kubernetes chooses the node; status shows why it found none.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence

import msgspec

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.config_substrates import KubernetesConfig
from ridgeline.fleet.substrates.kubernetes_api import ApiError, KubernetesApi, Object
from ridgeline.fleet.substrates.kubernetes_pods import amount, observed, pod, secret
from ridgeline.fleet.substrates.kubernetes_watch import PodWatch
from ridgeline.fleet.substrates.substrate import (
    Capacity,
    Handle,
    Observed,
    ReplicaSpec,
    SubstrateError,
)

KILL_GRACE_S = 5.0  # seconds added to the drain, for the last events of streams
GONE_S = 60.0  # seconds after that for the node to confirm that the pod has ended
POLL_S = 0.25
KEPT = 5  # ended pods of a fleet, for their logs; older ones are deleted at the next start
LINE_BYTES = 8  # a short line of a log: the API counts lines, the caller bytes


class Place(msgspec.Struct, frozen=True):
    """The place of a Handle."""

    fleet: str
    name: str
    uid: str


class KubernetesSubstrate:
    def __init__(self, config: KubernetesConfig, api: KubernetesApi | None = None) -> None:
        self._config, self._api = config, api or KubernetesApi(config)
        self._watches: dict[str, PodWatch] = {}

    async def start(self, spec: ReplicaSpec) -> Handle:
        watch = self._watch(spec.fleet)
        await self._delete_ended(watch)
        made = await self._create(pod(spec, self._config), spec.mark)
        watch.put(made)
        try:
            await self._create_secret(made, spec.environment)
        except ApiError:
            with contextlib.suppress(ApiError):
                await self._delete(made["metadata"]["name"], made["metadata"]["uid"], 1)
            raise
        return _handle(made, spec.fleet)

    async def adopt(self, handle: Handle, environment: Mapping[str, str] | None) -> None:
        """Make the Secret of a pod whose controller ended between the two: no container starts without it."""
        if environment is None:
            return
        place = _place(handle)
        found = await self._watch(place.fleet).get(place.name)
        if found is not None and found["metadata"]["uid"] == place.uid and observed(found).phase == "pending":
            await self._create_secret(found, environment)

    async def stop(self, handle: Handle, drain_s: float) -> None:
        place = _place(handle)
        grace_s = math.ceil(drain_s + KILL_GRACE_S) if drain_s > 0 else 1  # 0 would not wait for the node
        if not await self._delete(place.name, place.uid, grace_s):
            return
        clock = AwakeClock()
        deadline = clock() + grace_s + GONE_S
        while await self._is_there(place):
            if clock() > deadline:
                raise SubstrateError(
                    f"pod {place.name} was deleted {grace_s + GONE_S:.0f} s ago and is still there: its node "
                    f"may be lost. If it is, `kubectl delete pod {place.name} --force` removes the record"
                )
            await asyncio.sleep(POLL_S)

    async def poll(self, handle: Handle) -> Observed:
        place = _place(handle)
        found = await self._watch(place.fleet).get(place.name)
        if found is None or found["metadata"]["uid"] != place.uid:
            return Observed("exited", reason=f"pod {place.name} does not exist: it was deleted or evicted")
        return observed(found)

    async def logs(self, handle: Handle, last_bytes: int) -> bytes:
        path = f"{self._api.pods}/{_place(handle).name}/log"
        return await self._api.tail(path, {"tailLines": last_bytes // LINE_BYTES + 1}, last_bytes)

    async def find(self, fleet: str) -> Sequence[Handle]:
        return [
            _handle(found, fleet)
            for found in await self._watch(fleet).all()
            if observed(found).phase != "exited" and "deletionTimestamp" not in found["metadata"]
        ]

    async def capacity(self) -> Capacity:
        """What the nodes can allocate together. Unknown without the right to list nodes."""
        try:
            nodes = (await self._api.call("GET", "/api/v1/nodes")).get("items", [])
        except ApiError as error:
            if error.status in (401, 403):
                return Capacity()
            raise
        free = [
            node.get("status", {}).get("allocatable", {})
            for node in nodes
            if not node.get("spec", {}).get("unschedulable", False)
        ]
        return Capacity(
            cpus=sum(amount(one.get("cpu", 0)) for one in free),
            memory=sum(amount(one.get("memory", 0)) for one in free) / (1 << 30),
            gpus=int(sum(amount(one.get(self._config.gpu_resource, 0)) for one in free)),
        )

    def limits(self) -> Capacity:
        return Capacity()  # a replica without room is pending

    async def close(self) -> None:
        for watch in self._watches.values():
            await watch.close()
        self._watches.clear()
        self._api.close()

    def _watch(self, fleet: str) -> PodWatch:
        if fleet not in self._watches:
            self._watches[fleet] = PodWatch(self._api, fleet)
        return self._watches[fleet]

    async def _create(self, manifest: Object, mark: str) -> Object:
        try:
            return await self._api.call("POST", self._api.pods, manifest)
        except ApiError as error:
            if error.status not in (0, 409):  # 0: no answer; the pod may have been made
                raise
            name = manifest["metadata"]["name"]
            try:
                made = await self._api.call("GET", f"{self._api.pods}/{name}")
            except ApiError:
                raise error from None  # a pod that is made later has no record: the keeper ends it
            if made["metadata"].get("annotations", {}).get("ridgeline/mark") != mark:
                raise SubstrateError(f"pod {name} already exists and belongs to another replica") from error
            return made

    async def _create_secret(self, made: Object, environment: Mapping[str, str]) -> None:
        try:
            await self._api.call("POST", self._api.secrets, secret(made, environment))
        except ApiError as error:
            if error.status != 409:  # 409: an earlier try made it
                raise

    async def _delete(self, name: str, uid: str, grace_s: int) -> bool:
        """Returns whether there was such a pod."""
        options: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": grace_s,
            "preconditions": {"uid": uid},  # never a pod that got the name later
        }
        try:
            await self._api.call("DELETE", f"{self._api.pods}/{name}", options)
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def _is_there(self, place: Place) -> bool:
        try:
            found = await self._api.call("GET", f"{self._api.pods}/{place.name}")
        except ApiError as error:
            if error.status == 404:
                return False
            if error.status == 0:  # the API does not answer now
                return True
            raise
        return bool(found["metadata"]["uid"] == place.uid)

    async def _delete_ended(self, watch: PodWatch) -> None:
        ended = [one for one in watch.pods.values() if observed(one).phase == "exited"]
        ended.sort(key=lambda one: str(one["metadata"].get("creationTimestamp", "")), reverse=True)
        for one in ended[KEPT:]:
            await self._delete(one["metadata"]["name"], one["metadata"]["uid"], 1)


def _handle(found: Object, fleet: str) -> Handle:
    metadata = found["metadata"]
    replica = metadata.get("annotations", {}).get("ridgeline/mark", "").partition("/")[2]
    place = Place(fleet, metadata["name"], metadata["uid"])
    return Handle(replica, msgspec.json.encode(place).decode())


def _place(handle: Handle) -> Place:
    return msgspec.json.decode(handle.place, type=Place)
