"""KubernetesApi: the few calls of the Kubernetes API that a controller needs, on the proxy's HTTP client.

Why not the `kubernetes` package: docs/decisions/0015. In a pod, address, token and CA are those of its
service account; the token is read again every minute. Elsewhere, `kubectl proxy` gives an address
that needs neither.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlencode

import msgspec

from ridgeline.fleet.config_substrates import KubernetesConfig
from ridgeline.fleet.substrates.substrate import SubstrateError
from ridgeline.proxy.errors import ProxyError, RequestBroken
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import read_url
from ridgeline.proxy.request_head import Headers

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_S = 240  # seconds after which the API ends a watch; the reader asks again
TIMEOUTS = Timeouts(connect_s=5.0, first_byte_s=30.0, idle_s=30.0)
WATCH_TIMEOUTS = Timeouts(connect_s=5.0, first_byte_s=WATCH_S + 30.0, idle_s=WATCH_S + 30.0)
MAX_BODY = 64 << 20
TOKEN_S = 60.0  # seconds after which a token file is read again

Object = dict[str, Any]


class ApiError(SubstrateError):
    """The API answered with an error, or did not answer (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class KubernetesApi:
    def __init__(self, config: KubernetesConfig, client: HttpClient | None = None) -> None:
        url, token_file, ca_file = config.api, config.token_file, config.ca_file
        if url is None:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
            if not host:
                raise SubstrateError(
                    "this process is not in a Kubernetes pod (KUBERNETES_SERVICE_HOST is not set): run "
                    '`kubectl proxy` and set [substrate.kubernetes] api = "http://127.0.0.1:8001"'
                )
            url = f"https://[{host}]:{port or 443}" if ":" in host else f"https://{host}:{port or 443}"
            token_file, ca_file = token_file or ACCOUNT / "token", ca_file or ACCOUNT / "ca.crt"
        self._origin = read_url(url, ca_file, "[substrate.kubernetes] api")
        self._token_file, self._token, self._token_due = token_file, b"", 0.0
        self._client = client or HttpClient()
        self.namespace = config.namespace or _own_namespace()

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def secrets(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/secrets"

    async def call(
        self, method: str, path: str, body: Object | None = None, query: Mapping[str, str | int] | None = None
    ) -> Object:
        """Returns the answer's object. ApiError for every status that is not 2xx."""
        answer = await self._ask(method, path, body, query, TIMEOUTS, again=True)
        return _object(answer)

    async def tail(self, path: str, query: Mapping[str, str | int], last_bytes: int) -> bytes:
        """Returns the end of a text answer."""
        return (await self._ask("GET", path, None, query, TIMEOUTS, again=True))[-last_bytes:]

    async def watch(self, path: str, query: Mapping[str, str | int]) -> AsyncIterator[Object]:
        """Yield events until the API ends the watch."""
        asked = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": WATCH_S}
        try:
            answer = await self._client.ask(
                self._origin,
                "GET",
                f"{path}?{urlencode(asked)}",
                self._headers(),
                timeouts=WATCH_TIMEOUTS,
                stream=True,
            )
            if answer.status != 200:
                raise _refused(answer.status, await answer.read(MAX_BODY))
        except ProxyError as error:
            raise _unreachable(error) from error
        try:
            rest = b""
            while (piece := await answer.next()) is not None:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line:
                        yield _object(line)
        except ProxyError as error:
            raise _unreachable(error) from error
        finally:
            answer.abort()

    def close(self) -> None:
        self._client.close()

    async def _ask(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: Mapping[str, str | int] | None,
        timeouts: Timeouts,
        again: bool,
    ) -> bytes:
        where = f"{path}?{urlencode(query)}" if query else path
        content = b"" if body is None else msgspec.json.encode(body)
        try:
            answer = await self._client.ask(
                self._origin, method, where, self._headers(), content, timeouts=timeouts
            )
            text = await answer.read(MAX_BODY)
        except RequestBroken as error:
            if again and error.cause in ("stale", "reset"):
                # Every call may be repeated: names are fixed, so a second create is a conflict.
                return await self._ask(method, path, body, query, timeouts, again=False)
            raise _unreachable(error) from error
        except ProxyError as error:
            raise _unreachable(error) from error
        if not 200 <= answer.status < 300:
            raise _refused(answer.status, text)
        return text

    def _headers(self) -> Headers:
        headers: Headers = [(b"accept", b"application/json"), (b"content-type", b"application/json")]
        if self._token_file is not None:
            if monotonic() >= self._token_due:
                try:
                    self._token = self._token_file.read_bytes().strip()
                except OSError as error:
                    raise ApiError(0, "", f"{self._token_file}: cannot be read: {error.strerror}") from error
                self._token_due = monotonic() + TOKEN_S
            headers.append((b"authorization", b"Bearer " + self._token))
        return headers


def _object(text: bytes) -> Object:
    try:
        return msgspec.json.decode(text, type=Object)
    except msgspec.MsgspecError as error:
        raise ApiError(0, "", f"the Kubernetes API's answer is not a JSON object: {error}") from error


def _refused(status: int, text: bytes) -> ApiError:
    """The error of a Status object, which the API sends with every error; proxies send other texts."""
    reason, message = "", text[:500].decode(errors="replace")
    try:
        found = msgspec.json.decode(text)
        reason, message = str(found.get("reason", "")), str(found.get("message", message))
    except (msgspec.DecodeError, AttributeError):
        pass
    return ApiError(status, reason, f"the Kubernetes API answered {status} {reason}: {message}")


def _unreachable(error: ProxyError) -> ApiError:
    why = str(error).replace("the upstream", "it")
    return ApiError(0, "", f"the Kubernetes API cannot be reached: {why}. Check [substrate.kubernetes] api.")


def _own_namespace() -> str:
    try:
        return (ACCOUNT / "namespace").read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"
