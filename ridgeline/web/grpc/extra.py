"""Checks the option `grpc_port` before a model is loaded: its packages are installed, its port is free.

Imports none of the packages, so that a start stays quick.
"""

from __future__ import annotations

import socket
from importlib.util import find_spec

from ridgeline.options import OptionError

PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "google.protobuf", "google.rpc")


def require_grpc(option: str = "grpc_port") -> None:
    """Raises OptionError that names the missing package and the extra."""
    for name in PACKAGES:
        if not _is_there(name):
            raise OptionError(
                f"{option} needs the package {name}, which is not installed: "
                "pip install 'ridgeline[grpc]', or remove the option"
            )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def check_port(host: str, port: int) -> None:
    """Raises OptionError if the port is in use: before a model is loaded, not after."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise port_taken(host, port, str(error)) from error


def port_taken(host: str, port: int, why: str) -> OptionError:
    return OptionError(f"cannot listen for gRPC on {host}:{port}: {why}; choose another port with grpc_port")
