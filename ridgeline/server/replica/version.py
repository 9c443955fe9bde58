"""The version of a server's model, software and settings: a stream continues only on the same version."""

from __future__ import annotations

import hashlib
import secrets

import msgspec

import ridgeline
from ridgeline.engine.client.client import AsyncClient
from ridgeline.server.served_models import ServedModels


class ReplicaEpoch:
    """The id of this server process."""

    def __init__(self, served_models: ServedModels) -> None:
        self.value = secrets.token_hex(8)


def replica_version(served_models: ServedModels, client: AsyncClient) -> str:
    """With equal versions, equal requests get equal tokens, and equal tokens become equal events."""
    config, hello, template = served_models.config, client.hello, client.tokenizer.chat_template
    parts = (
        ridgeline.__version__,
        hello.files or hello.model,
        hello.backend,
        hello.max_context,
        hello.sampling.values(),
        "" if template is None else template.source,
        config.tool_parser,
        config.reasoning_parser,
        config.reasoning_budget,
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]
