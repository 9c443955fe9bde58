"""BlockingClient: HTTP requests from commands and from tools around a run. Standard library only.

One connection for each request. Every status is an answer, and no redirect is followed: a key goes to the
address that was named. Servers and gateways use `http_client`.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from ridgeline.proxy.errors import BrokenOff, Unreachable


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class OpenAnswer:
    """An answer whose head has arrived. Close it, or use it in a `with` statement."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}

    def read(self, limit: int | None = None) -> bytes:
        """The rest of the body, or its first `limit` bytes."""
        try:
            return self._response.read(limit)
        except (OSError, http.client.HTTPException) as error:
            raise BrokenOff(str(error) or type(error).__name__) from error

    def lines(self) -> Iterator[bytes]:
        """Each line of the body as it arrives, with its line end."""
        try:
            yield from self._response
        except (OSError, http.client.HTTPException) as error:
            raise BrokenOff(str(error) or type(error).__name__) from error

    def close(self) -> None:
        self._response.close()

    def __enter__(self) -> OpenAnswer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlockingClient:
    """Requests to one server. May be used from several threads at once.

    url:       http://host[:port][/base] or https://…; a trailing /v1 is dropped: it is part of each path.
    timeout_s: time limit for connecting, and for each read of an answer.
    direct:    connect without a proxy, even if the environment sets one (HTTP_PROXY, HTTPS_PROXY).
    """

    def __init__(self, url: str, *, timeout_s: float, api_key: str = "", direct: bool = False) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        proxies = urllib.request.ProxyHandler({} if direct else None)
        self._opener = urllib.request.build_opener(proxies, _EveryStatus)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> WholeAnswer:
        """The whole answer, or Unreachable or BrokenOff."""
        with self.open(method, path, body, query, content_type) as answer:
            return WholeAnswer(answer.status, answer.headers, answer.read())

    def is_ready(self, path: str) -> bool:
        """Whether the server answers 200 here; false while it does not listen yet."""
        try:
            return self.ask("GET", path).status == 200
        except (Unreachable, BrokenOff):
            return False

    def open(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> OpenAnswer:
        """An answer to be read as it arrives, or Unreachable."""
        url = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        headers = self._headers if body is None else {**self._headers, "content-type": content_type}
        try:
            if urllib.parse.urlsplit(url).scheme not in ("http", "https"):  # urllib would also open files
                raise ValueError("the address must begin with http:// or https://")
            request = urllib.request.Request(url, data=body, headers=headers, method=method)
            response = self._opener.open(request, timeout=self._timeout_s)
        except (OSError, ValueError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            origin = cause if isinstance(cause, Exception) else error
            raise Unreachable(str(cause) or type(error).__name__) from origin
        return OpenAnswer(cast(http.client.HTTPResponse, response))


class _EveryStatus(urllib.request.HTTPErrorProcessor):
    """Neither raises for a status nor follows a redirect."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response
