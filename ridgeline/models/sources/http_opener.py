"""An opener of URLs that gives up early on a host that does not answer, and waits longer for its answer."""

from __future__ import annotations

import http.client
import urllib.request

CONNECT_S = 5.0  # of one address, with its TLS handshake


def opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """As `build_opener`. The timeout of a request is that of its answer."""
    return urllib.request.build_opener(_Http(), _Https(), *handlers)


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        answer_s = self.timeout
        self.timeout = CONNECT_S if answer_s is None else min(CONNECT_S, answer_s)
        try:
            super().connect()
        finally:
            self.timeout = answer_s
        self.sock.settimeout(answer_s)


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request)
