"""The speed of the network link towards a host, from the kernel's routes and its network devices.

None where it is not known: loopback, most virtual devices, IPv6, systems other than Linux.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

ROUTES = Path("/proc/net/route")
DEVICES = Path("/sys/class/net")


def link_bytes_per_s(host: str, routes: Path = ROUTES, devices: Path = DEVICES) -> float | None:
    try:
        address = struct.unpack(">I", socket.inet_aton(socket.gethostbyname(host)))[0]
        device = _device(address, routes.read_text().splitlines()[1:])
        megabits = int((devices / device / "speed").read_text()) if device else -1
    except (OSError, ValueError, UnicodeError):
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def _device(address: int, routes: list[str]) -> str:
    """Of the most specific route. Addresses in the table are little-endian on every machine we run on."""
    best, found = -1, ""
    if address >> 24 == 127:
        return ""
    for line in routes:
        fields = line.split()
        target, mask = (int.from_bytes(bytes.fromhex(fields[place]), "little") for place in (1, 7))
        if address & mask == target and mask > best:
            best, found = mask, fields[0]
    return found
