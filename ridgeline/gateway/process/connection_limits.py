"""The number of connections that a worker accepts: as configured, bounded by its limit on open files."""

from __future__ import annotations

import logging

from ridgeline.gateway.gateway_config import GatewayConfig
from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.open_files import allow_open_files

log = logging.getLogger("ridgeline.gateway")

OTHER_FILES = 512  # uploads, stores, logs, other processes
FILES_EACH = 2  # the client's socket and the upstream's
ONE_ADDRESS = 4  # default share of all connections for one address


def connection_limits(gateway: GatewayConfig) -> ConnectionLimits:
    """Raises the process's limit on open files. If that is not enough, accepts fewer connections: one beyond
    them gets 503, but one beyond the open files would wait until a file is closed.
    """
    connections = gateway.max_connections
    files = allow_open_files(connections * FILES_EACH + OTHER_FILES)
    possible = max((files - OTHER_FILES) // FILES_EACH, files // (2 * FILES_EACH), 1)
    if possible < connections:
        log.warning(
            "max_connections = %d needs more open files than %d (ulimit -n); accepting %d connections",
            *(connections, files, possible),
        )
        connections = possible
    per_address = gateway.max_connections_per_address or max(connections // ONE_ADDRESS, 1)
    return ConnectionLimits(gateway.max_head_bytes, gateway.head_timeout_s, connections, per_address)
