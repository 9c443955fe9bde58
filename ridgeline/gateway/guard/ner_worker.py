"""The process behind NameFinder: reads texts from stdin, writes Presidio's findings to stdout, both as
length-prefixed msgpack.

    python -m ridgeline.gateway.guard.ner_worker MODEL LANGUAGE KIND,KIND

Imports Presidio and spaCy; the gateway's own processes do not. A request that fails is answered with nil,
and the next one is read. The process exits at the end of stdin.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec


def main() -> None:
    model, language, kinds = sys.argv[1:4]
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # output of a library must not come between the answers
    engine = _engine(model, language)
    entities = [kind.upper() for kind in kinds.split(",")]
    decoder = msgspec.msgpack.Decoder(list[str])
    while (head := questions.read(4)) and len(head) == 4:
        texts = decoder.decode(_read(questions, *struct.unpack("<I", head)))
        try:
            found = [_spans(engine.analyze(text, language=language, entities=entities)) for text in texts]
        except Exception:  # spaCy refuses some texts, for example those over its length limit
            found = None
        answer = msgspec.msgpack.encode(found)
        answers.write(struct.pack("<I", len(answer)) + answer)
        answers.flush()


def _engine(model: str, language: str) -> Any:
    if not model.endswith("_trf"):
        # Presidio and spaCy import these if they are installed: seconds and hundreds of megabytes.
        sys.modules["torch"] = sys.modules["transformers"] = None  # type: ignore[assignment]
    import spacy

    if not (spacy.util.is_package(model) or Path(model).is_dir()):
        sys.exit(f"the spaCy model {model} is not installed: python -m spacy download {model}")
    from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
    from presidio_analyzer.nlp_engine import SpacyNlpEngine
    from presidio_analyzer.predefined_recognizers import SpacyRecognizer

    nlp = SpacyNlpEngine(models=[{"lang_code": language, "model_name": model}])
    registry = RecognizerRegistry(supported_languages=[language])
    registry.add_recognizer(SpacyRecognizer(supported_language=language))
    return AnalyzerEngine(registry=registry, nlp_engine=nlp, supported_languages=[language])


def _spans(results: list[Any]) -> list[tuple[int, int, str]]:
    spans: list[tuple[int, int, str]] = []
    for result in sorted(results, key=lambda result: (result.start, -result.end)):
        if not spans or result.start >= spans[-1][1]:
            spans.append((result.start, result.end, result.entity_type.lower()))
    return spans


def _read(stream: BinaryIO, length: int) -> bytes:
    return stream.read(length)


if __name__ == "__main__":
    main()
