"""The server of `ridgeline rag`: its flags, its client, and its errors as the command's."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.source import API_KEY_VARIABLE
from ridgeline.retrieval.client import RequestFailed, VectorStoreClient

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_STORE = "files"


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server or gateway (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="KEY", help=f"its key (default: ${API_KEY_VARIABLE})")


def add_server(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--store", default=DEFAULT_STORE, metavar="NAME", help=f"the vector store ({DEFAULT_STORE})"
    )


class told:
    """Errors of the client as the command's, with what to do."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RequestFailed):
            hint = ""
            if not error.status:
                hint = "; is `ridgeline serve smollm2-135m all-minilm-l6-v2` running there?"
            elif error.status == 401:
                hint = f"; give --api-key or ${API_KEY_VARIABLE}"
            raise RemoteError(f"{error}{hint}") from error


def client_of(args: argparse.Namespace) -> VectorStoreClient:
    return VectorStoreClient(args.url, args.api_key or os.environ.get(API_KEY_VARIABLE, ""))


def store_of(client: VectorStoreClient, name: str) -> dict[str, Any]:
    store = client.store(name)
    if store is None:
        raise RemoteError(
            f"{client.url} has no vector store {name!r}: `ridgeline rag add FILE --store {name}`"
        )
    return store
