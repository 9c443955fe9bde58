"""Which names a listener without keys answers to: the defence against DNS rebinding.

A page of any site can make a browser send requests to a private address, under a name of its own that it has
pointed there. The Host and Origin headers tell: a browser sets both, and no page can change them. Used by the
server's gate and by the gateway.
"""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    return host == "localhost" or ((address := _address(host)) is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
