"""The endpoints of this package, for the table in `server.app`."""

from __future__ import annotations

from typing import Any

from ridgeline.server.http.endpoint import Endpoint, Generating
from ridgeline.server.ollama_api import handlers, models
from ridgeline.server.ollama_api.bodies import (
    OllamaChatLine,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaError,
    OllamaGenerateLine,
    OllamaModels,
    OllamaRunningModels,
    OllamaShown,
    OllamaVersion,
)
from ridgeline.server.ollama_api.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)

_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
_GENERATE: dict[str, Any] = {"prompt": "What is the capital of France?", "options": {"num_predict": 20}}
ERRORS = (429, 504)

ENDPOINTS = [
    Endpoint(
        "POST",
        "/api/chat",
        Generating(handlers.chat),
        "A conversation's next message in Ollama's shape, as lines of JSON or whole",
        request=OllamaChatRequest,
        response=OllamaChatLine,
        lines=OllamaChatLine,
        errors=ERRORS,
        error=OllamaError,
        examples=(_CHAT, {**_CHAT, "stream": False, "options": {"temperature": 0, "num_predict": 20}}),
    ),
    Endpoint(
        "POST",
        "/api/generate",
        Generating(handlers.generate),
        "The answer to one prompt in Ollama's shape, as lines of JSON or whole",
        request=OllamaGenerateRequest,
        response=OllamaGenerateLine,
        lines=OllamaGenerateLine,
        errors=ERRORS,
        error=OllamaError,
        examples=(_GENERATE, {**_GENERATE, "stream": False, "raw": True}),
    ),
    Endpoint(
        "POST",
        "/api/embed",
        handlers.embed,
        "A vector for each text in Ollama's shape",
        request=OllamaEmbedRequest,
        response=OllamaEmbeddings,
        errors=ERRORS,
        error=OllamaError,
        examples=({"input": ["a", "b"]},),
    ),
    Endpoint(
        "POST",
        "/api/embeddings",
        handlers.embeddings,
        "A vector for one text in Ollama's older shape",
        request=OllamaEmbeddingsRequest,
        response=OllamaEmbedding,
        errors=ERRORS,
        error=OllamaError,
        examples=({"prompt": "hello"},),
    ),
    Endpoint(
        "POST",
        "/api/show",
        models.show,
        "One served model in Ollama's shape: context, template, what it can do",
        request=OllamaShowRequest,
        response=OllamaShown,
        error=OllamaError,
        examples=({},),
    ),
    Endpoint(
        "GET",
        "/api/tags",
        models.tags,
        "The served names, Ollama's way",
        response=OllamaModels,
        error=OllamaError,
    ),
    Endpoint(
        "GET",
        "/api/ps",
        models.ps,
        "The models whose engines run, Ollama's way",
        response=OllamaRunningModels,
        error=OllamaError,
    ),
    Endpoint(
        "GET",
        "/api/version",
        models.version,
        "The version of Ollama's API that is spoken",
        response=OllamaVersion,
        error=OllamaError,
    ),
]
