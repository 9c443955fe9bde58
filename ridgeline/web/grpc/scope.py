"""The ASGI scope's key for requests that came as an RPC. Imports nothing: handlers of HTTP read it too."""

from __future__ import annotations

RPC = "ridgeline.rpc"  # /package.Service/Method; set inside this process, never by a client
