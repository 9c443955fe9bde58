"""From what a body asks of its answer's form to a grammar. (First form; to be completed with schema checks.)"""

from __future__ import annotations

import json
from typing import Any

from ridgeline.engine.grammar import Grammar
from ridgeline.server.errors import BadRequest


def asked_grammar(body: Any) -> tuple[Grammar, str] | None:
    format = getattr(body, "response_format", None)
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar("json_object"), "response_format"
    if format.type == "json_schema" and format.json_schema is not None:
        return Grammar(
            "json_schema", json.dumps(format.json_schema.schema)
        ), "response_format.json_schema.schema"
    raise BadRequest("response_format.type", "unknown type")
