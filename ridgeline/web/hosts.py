"""The host names that a listener without keys accepts: the defence against DNS rebinding.

A web page can point its own name at a private address and then let the browser send requests there as to its
own site. The browser sets the Host and Origin headers, and a page cannot change them. Used by the server and
by the gateway.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence
from typing import Literal

Code = Literal["host_not_allowed", "origin_not_allowed"]


def is_loopback(host: str) -> bool:
    """Whether a listen address can be reached only from this machine."""
    return host == "localhost" or ((address := _address(host)) is not None and address.is_loopback)


class HostCheck:
    """Accepts loopback names, IP addresses, the listener's own name, and the configured ones.

    An IP address in Host cannot come from DNS rebinding, which needs a name.
    """

    def __init__(self, listens_on: str, hosts: Sequence[str], origins: Sequence[str] = ()) -> None:
        """hosts: further names; *.NAME for subdomains, * for any. origins: of pages that may call."""
        self._names = {"localhost", listens_on.lower(), *(host.lower() for host in hosts)}
        self._origins = frozenset(origins)
        self.knows = functools.lru_cache(1024)(self._knows)

    def refusal(self, host: str, origin: str | None) -> tuple[Code, str] | None:
        """Why a request with these headers is rejected; None if it is accepted."""
        if not self.knows(host):
            name = _name(host)
            return "host_not_allowed", (
                f"the Host {host[:256]!r} is not a name of this server. Without API keys it accepts only "
                "localhost, IP addresses and the names in allowed_hosts, as a protection against DNS "
                f"rebinding. Start it with --allowed-hosts {name[:256]}, or require keys"
            )
        if origin is not None and not self.allows_origin(origin, host):
            return "origin_not_allowed", (
                f"pages of {origin[:256]} may not call this server, which has no keys. To allow them, start "
                f"it with --cors-origins {origin[:256]} (server), or require keys"
            )
        return None

    def allows_origin(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may call: the server's own, or a configured one."""
        return "*" in self._origins or origin in self._origins or origin.partition("://")[2] == host

    def _knows(self, host: str) -> bool:
        name = _name(host)
        if not host or "*" in self._names or name in self._names or name.endswith(".localhost"):
            return True  # a request without Host is HTTP/1.0, which browsers do not send
        if _address(name) is not None:
            return True
        parents = name.split(".")[1:]
        return any(f"*.{'.'.join(parents[start:])}" in self._names for start in range(len(parents)))


def _name(host: str) -> str:
    """A Host header without its port, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
