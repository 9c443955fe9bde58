"""A small Kubernetes API on a loopback port, for tests: pods, their logs, Secrets, nodes, watches.

It keeps versions, a history of events (and forgets it: 410), labels, owners, preconditions, grace periods and
tokens as the real API does. It schedules nothing by itself: a test plays the scheduler and the node. Pods and
Secrets are checked against the published schemas where the package kubernetes-validate is installed.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

try:
    import kubernetes_validate
except ImportError:
    kubernetes_validate = None

NAMESPACE = "llm"
TOKEN = "a-service-account-token"
Object = dict[str, Any]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class EmulatedKubernetes:
    def __init__(self) -> None:
        self.pods: dict[str, Object] = {}
        self.secrets: dict[str, Object] = {}
        self.logs: dict[str, bytes] = {}
        self.nodes: list[Object] = []
        self.requests: list[tuple[str, str]] = []
        self.refuse: dict[tuple[str, str], int] = {}  # (method, last part of the path) → status
        self.mute: set[tuple[str, str]] = set()  # calls of this kind are carried out and not answered
        self.deleted: list[tuple[str, int]] = []  # names and grace periods
        self._version, self._forgotten = 100, 0
        self._history: list[tuple[int, Object]] = []
        self._changed = asyncio.Condition()
        self._watches: set[web.StreamResponse] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application(middlewares=[self._gate])
        base = f"/api/v1/namespaces/{NAMESPACE}"
        app.router.add_get(f"{base}/pods", self._list)
        app.router.add_post(f"{base}/pods", self._create_pod)
        app.router.add_get(f"{base}/pods/{{name}}", self._get)
        app.router.add_delete(f"{base}/pods/{{name}}", self._delete)
        app.router.add_get(f"{base}/pods/{{name}}/log", self._log)
        app.router.add_post(f"{base}/secrets", self._create_secret)
        app.router.add_get("/api/v1/nodes", self._nodes)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    # ── the scheduler and the node, played by a test ──

    async def set_status(self, name: str, **status: Any) -> None:
        found = self.pods[name]
        found["status"] = {**found["status"], **status}
        await self._event("MODIFIED", found)

    async def unschedulable(self, name: str, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        await self.set_status(name, conditions=[{**condition, "lastTransitionTime": now()}])

    async def scheduled(self, name: str) -> None:
        condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now()}
        self.pods[name]["spec"]["nodeName"] = "node-1"
        await self.set_status(name, conditions=[condition])

    async def waiting(self, name: str, reason: str, message: str = "") -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        await self.set_status(name, containerStatuses=[{"name": "server", "state": state}])

    async def running(self, name: str, address: str) -> None:
        state = {"running": {"startedAt": now()}}
        statuses = [{"name": "server", "state": state}]
        await self.set_status(name, phase="Running", podIP=address, containerStatuses=statuses)

    async def ended(self, name: str, code: int, reason: str) -> None:
        state = {"terminated": {"exitCode": code, "reason": reason, "startedAt": now(), "finishedAt": now()}}
        phase = "Failed" if code else "Succeeded"
        await self.set_status(name, phase=phase, containerStatuses=[{"name": "server", "state": state}])

    async def remove(self, name: str) -> None:
        """The node confirms that nothing of the pod runs. Secrets that it owns go with it."""
        found = self.pods.pop(name)
        uid = found["metadata"]["uid"]
        for other, one in list(self.secrets.items()):
            if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", [])):
                del self.secrets[other]
        await self._event("DELETED", found)

    def forget_history(self) -> None:
        """Watches from an older version get 410, as after the API's compaction."""
        self._forgotten = self._version
        self._history.clear()

    def cut_watches(self) -> None:
        for response in self._watches:
            transport = response._req.transport if response._req is not None else None
            if transport is not None:
                transport.abort()

    async def bookmark(self) -> None:
        self._version += 1
        version = {"metadata": {"resourceVersion": str(self._version)}}
        async with self._changed:
            event = {"type": "BOOKMARK", "object": {"kind": "Pod", **version}}
            self._history.append((self._version, event))
            self._changed.notify_all()

    # ── the API ──

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized", "Unauthorized")
        if status := self.refuse.get((request.method, request.path.rpartition("/")[2])):
            return _status(status, "Forbidden" if status == 403 else "InternalError", "refused by the test")
        answer: web.StreamResponse = await handler(request)
        if (request.method, request.path.rpartition("/")[2]) in self.mute:
            await asyncio.sleep(3600)  # carried out, but never answered
        return answer

    async def _create_pod(self, request: web.Request) -> web.Response:
        made = await request.json()
        if (problem := _schema_problem(made)) is not None:
            return _status(422, "Invalid", problem)
        name = made["metadata"]["name"]
        if name in self.pods:
            return _status(409, "AlreadyExists", f'pods "{name}" already exists')
        made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "namespace": NAMESPACE}
        made["status"] = {"phase": "Pending"}
        self.pods[name] = made
        await self._event("ADDED", made)
        return web.json_response(made, status=201)

    async def _create_secret(self, request: web.Request) -> web.Response:
        made = await request.json()
        if (problem := _schema_problem(made)) is not None:
            return _status(422, "Invalid", problem)
        name = made["metadata"]["name"]
        if name in self.secrets:
            return _status(409, "AlreadyExists", f'secrets "{name}" already exists')
        self.secrets[name] = made
        return web.json_response(made, status=201)

    async def _get(self, request: web.Request) -> web.Response:
        found = self.pods.get(request.match_info["name"])
        if found is None:
            return _status(404, "NotFound", f'pods "{request.match_info["name"]}" not found')
        return web.json_response(found)

    async def _delete(self, request: web.Request) -> web.Response:
        found = self.pods.get(request.match_info["name"])
        if found is None:
            return _status(404, "NotFound", f'pods "{request.match_info["name"]}" not found')
        options = await request.json()
        uid = options.get("preconditions", {}).get("uid")
        if uid is not None and uid != found["metadata"]["uid"]:
            return _status(409, "Conflict", "the UID in the precondition does not match")
        grace = options["gracePeriodSeconds"]
        self.deleted.append((found["metadata"]["name"], grace))
        if "nodeName" not in found["spec"] or found["status"]["phase"] in ("Failed", "Succeeded"):
            await self.remove(found["metadata"]["name"])
        else:
            found["metadata"] |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace}
            await self._event("MODIFIED", found)
        return web.json_response(found)

    async def _log(self, request: web.Request) -> web.Response:
        text = self.logs.get(request.match_info["name"])
        if text is None:
            return _status(400, "BadRequest", "container is waiting to start: ContainerCreating")
        return web.Response(body=b"".join(text.splitlines(True)[-int(request.query["tailLines"]) :]))

    async def _nodes(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "NodeList", "items": self.nodes})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        wanted = dict(
            part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part
        )
        if request.query.get("watch") == "true":
            return await self._watch(request, wanted)
        items = [one for one in self.pods.values() if _has(one, wanted)]
        return web.json_response(
            {"kind": "PodList", "metadata": {"resourceVersion": str(self._version)}, "items": items}
        )

    async def _watch(self, request: web.Request, wanted: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        self._watches.add(response)
        seen = int(request.query["resourceVersion"])
        try:
            if seen < self._forgotten:
                gone = {
                    "kind": "Status",
                    "code": 410,
                    "reason": "Expired",
                    "message": "too old resource version",
                }
                await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                return response
            while True:
                news = [(version, event) for version, event in self._history if version > seen]
                for version, event in news:
                    seen = version
                    if event["type"] == "BOOKMARK" or _has(event["object"], wanted):
                        await response.write(json.dumps(event).encode() + b"\n")
                async with self._changed:
                    if not any(version > seen for version, _ in self._history):
                        await self._changed.wait()
        finally:
            self._watches.discard(response)

    async def _event(self, kind: str, found: Object) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        async with self._changed:
            event = {"type": kind, "object": json.loads(json.dumps(found))}
            self._history.append((self._version, event))
            self._changed.notify_all()


def _has(found: Object, wanted: dict[str, str]) -> bool:
    labels = found["metadata"].get("labels", {})
    return all(labels.get(name) == value for name, value in wanted.items())


def _schema_problem(made: Object) -> str | None:
    if kubernetes_validate is None:
        return None
    try:
        kubernetes_validate.validate(made, "1.37", strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return None


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code)
