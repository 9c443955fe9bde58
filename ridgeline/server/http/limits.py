"""Limits on the size of single fields. The structs of `protocol` carry these bounds: decoding refuses values
beyond them, the OpenAPI document shows them, and docs/limits.md is generated from both.

Limits that depend on the model (a prompt's length) are not here: the context bounds them.
"""

from __future__ import annotations

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000  # of one message's content
MAX_NAME_CHARACTERS = 256  # of models, speakers, roles, kinds
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TOKEN_IDS = 1024  # to bias or to stop at: the engine checks all of them for every token
MAX_SALT_CHARACTERS = 1024
MAX_DETOKENIZED = 1 << 20  # token ids in one request
MAX_TEMPLATE_VARIABLES = 256
MAX_CHOICE_TEXTS = 1_000
MAX_GRAMMAR_CHARACTERS = 128 << 10  # of a schema, a regular expression or a grammar that is given as text
MAX_TOOLS = 128
MAX_TOOL_BYTES = 256 << 10  # of their JSON, which is part of the prompt
MAX_CALLS = 1024  # in one message that is sent back
MAX_ID_CHARACTERS = 256
