"""The table of all paths of the gateway: the name in scopes and rows, and the handler."""

from __future__ import annotations

from typing import Literal

import msgspec

# model: the body names a model; sent to that model's upstream.
# object: files, batches, stored responses; sent to the object's upstream, for its owner only.
# own: answered by the gateway itself.
Handling = Literal["model", "object", "own"]


class Endpoint(msgspec.Struct, frozen=True):
    name: str  # its name in scopes and the ledger
    handling: Handling = "model"
    family: Literal["openai", "anthropic"] = "openai"
    kind: str = ""  # of body, by its name in the dialects
    multipart: bool = False


CHAT = Endpoint("chat", kind="chat")
COMPLETIONS = Endpoint("completions", kind="completions")
RESPONSES = Endpoint("responses", kind="responses")
MESSAGES = Endpoint("messages", family="anthropic", kind="messages")
COUNT_TOKENS = Endpoint("messages", family="anthropic", kind="count_tokens")
EMBEDDINGS = Endpoint("embeddings", kind="embeddings")
RERANK = Endpoint("rerank", kind="rerank")
SCORE = Endpoint("score", kind="score")
SPEECH = Endpoint("audio", kind="speech")
TRANSCRIPTION = Endpoint("audio", kind="transcriptions", multipart=True)
TRANSLATION = Endpoint("audio", kind="translations", multipart=True)
FILES = Endpoint("files", handling="object", kind="files")
BATCHES = Endpoint("batches", handling="object", kind="batches")
VECTOR_STORES = Endpoint("vector_stores", handling="object", kind="vector_stores")
STORED_RESPONSES = Endpoint("responses", handling="object", kind="stored_responses")
MODELS = Endpoint("models", handling="own", kind="models")
HEALTH = Endpoint("health", handling="own", kind="health")
HOME = Endpoint("home", handling="own", kind="home")

_POST: dict[str, Endpoint] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/rerank": RERANK,
    "/v1/score": SCORE,
    "/score": SCORE,
    "/v1/audio/speech": SPEECH,
    "/v1/audio/transcriptions": TRANSCRIPTION,
    "/v1/audio/translations": TRANSLATION,
    "/v1/files": FILES,
    "/v1/batches": BATCHES,
    "/v1/vector_stores": VECTOR_STORES,
}
_GET: dict[str, Endpoint] = {
    "/v1/models": MODELS,
    "/v1/files": FILES,
    "/v1/batches": BATCHES,
    "/v1/vector_stores": VECTOR_STORES,
    "/": HOME,
    "/health": HEALTH,
    "/healthz": HEALTH,
    "/ready": HEALTH,
}
# One object: prefix, then methods and what may follow its id; * is the id of an object within it.
_OBJECTS: dict[str, tuple[Endpoint, dict[str, frozenset[str]]]] = {
    "/v1/files/": (FILES, {"GET": frozenset({"", "content"}), "DELETE": frozenset({""})}),
    "/v1/batches/": (BATCHES, {"GET": frozenset({""}), "POST": frozenset({"cancel"})}),
    "/v1/responses/": (
        STORED_RESPONSES,
        {"GET": frozenset({"", "input_items"}), "DELETE": frozenset({""}), "POST": frozenset({"cancel"})},
    ),
    "/v1/models/": (MODELS, {"GET": frozenset({""})}),
    "/v1/vector_stores/": (
        VECTOR_STORES,
        {
            "GET": frozenset(
                {"", "files", "files/*", "files/*/content", "file_batches/*", "file_batches/*/files"}
            ),
            "POST": frozenset({"", "search", "files", "files/*", "file_batches", "file_batches/*/cancel"}),
            "DELETE": frozenset({"", "files/*"}),
        },
    ),
}

NAMES: tuple[str, ...] = tuple(
    sorted(
        {
            endpoint.name
            for endpoint in (*_POST.values(), *_GET.values(), STORED_RESPONSES)
            if endpoint not in (HEALTH, HOME)
        }
    )
)


class Place(msgspec.Struct, frozen=True):
    """The target of a request: the endpoint, and the object that it names, if any."""

    endpoint: Endpoint
    object_id: str = ""
    action: str = ""


_plain: dict[tuple[str, str], Place] = {("POST", path): Place(endpoint) for path, endpoint in _POST.items()}
_plain |= {("GET", path): Place(endpoint) for path, endpoint in _GET.items()}
_KNOWN_PATHS = frozenset(path for _, path in _plain)


def find(method: str, path: str) -> Place | tuple[str, ...]:
    """The place, or the methods that this path supports (none: no such path)."""
    place = _plain.get((method, path))
    if place is not None:
        return place
    for prefix, (endpoint, methods) in _OBJECTS.items():
        if not path.startswith(prefix):
            continue
        rest = path[len(prefix) :]
        # A model's name may hold slashes; an object's id may not.
        object_id, _, action = (rest, "", "") if endpoint is MODELS else rest.partition("/")
        if not object_id:
            break
        shape = _shape(action)
        if shape in methods.get(method, ()):
            return Place(endpoint, object_id, action)
        return tuple(name for name, actions in methods.items() if shape in actions)
    if path in _KNOWN_PATHS:
        return tuple(sorted(known for known, at in _plain if at == path))
    return ()


def _shape(action: str) -> str:
    """The action with * for the id in it."""
    steps = action.split("/")
    if len(steps) > 1 and steps[1] and steps[1] != "*":
        steps[1] = "*"
        return "/".join(steps)
    return action if len(steps) == 1 else "/"
