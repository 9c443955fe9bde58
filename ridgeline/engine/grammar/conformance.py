"""Conformance: checks a finished answer against its schema, for keywords that no grammar can enforce.

The validator is jsonschema-rs. Its run time is unbounded: a schema of a kilobyte can run forever. So
`python -m ridgeline.engine.grammar.conformance` forks a child for each answer, with a limit on its CPU time.
`AnswerCheck` runs in the process that has the answer's text: the server or `LLM`.
"""

from __future__ import annotations

import json
import queue
from typing import Any

from ridgeline.engine.errors import VIOLATION, InvalidRequest, SchemaViolation
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.forked import NO_TIME, TOO_LARGE, TOO_LONG, ForkedWorker, serve_forked

CPU_LIMIT_S = 0.25  # for one answer; a typical one takes milliseconds
PROCESSES = 2  # while one client's slow check runs, the other is free
MAX_BACKTRACKS = 1_000_000  # for one expression on one text
MAX_REASON = 300
MAX_KEPT = 256
DIED = {
    TOO_LONG: f"the check takes more than {CPU_LIMIT_S:g} s",
    TOO_LARGE: "the check needs too much memory",
    NO_TIME: "the machine was too busy for the check",
}


class AnswerCheck:
    """One answer: collects its text, then checks it against the schema."""

    def __init__(self, grammar: Grammar) -> None:
        self._schema = grammar.check
        self._words = ", ".join(grammar.checked)
        self._texts: list[str] = []

    @classmethod
    def of(cls, grammar: Grammar | None) -> AnswerCheck | None:
        """None if the grammar enforces everything."""
        return cls(grammar) if grammar is not None and grammar.check else None

    def add(self, text: str) -> None:
        self._texts.append(text)

    def refuse_violation(self) -> None:
        """Raises SchemaViolation if the answer breaks a keyword its grammar could not enforce. Blocks."""
        fault = _ask([self._schema, "".join(self._texts)])
        if fault is None:
            fault = "the check failed"
        if fault:
            raise SchemaViolation(
                f"{VIOLATION}: {fault}. The schema's {self._words} can only be "
                "checked when the answer is complete; retry, or state the constraint in the prompt too"
            )


def refuse_uncheckable(grammar: Grammar) -> None:
    """Raises InvalidRequest for a schema that the validator rejects. Blocks."""
    if not grammar.check or grammar.check in _checkable:
        return
    fault = _ask([grammar.check, None])
    if fault is None or fault:
        raise InvalidRequest("grammar", f"cannot be checked: {fault or 'the check failed'}")
    if len(_checkable) >= MAX_KEPT:
        _checkable.clear()
    _checkable.add(grammar.check)


_checkable: set[str] = set()  # schemas that the validator accepted
_idle: queue.LifoQueue[ForkedWorker] = queue.LifoQueue()
for _ in range(PROCESSES):
    _idle.put(ForkedWorker("ridgeline.engine.grammar.conformance", []))  # started on first use


def _ask(question: Any) -> Any:
    questions = _idle.get()
    try:
        return questions.ask(question)
    finally:
        _idle.put(questions)


# ---- the process ----


def main() -> None:
    try:
        import jsonschema_rs  # noqa: F401  the children inherit it
    except ImportError:
        missing = "install the package jsonschema-rs"
        serve_forked(lambda question: missing, CPU_LIMIT_S, DIED.__getitem__)
    serve_forked(fault, CPU_LIMIT_S, DIED.__getitem__)


def fault(question: Any) -> str:
    """Where and how the answer breaks its schema; "" if it does not. Without an answer: checks the schema."""
    import jsonschema_rs as rs

    schema, text = question
    options = rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS)
    try:
        validator = rs.validator_for(
            json.loads(schema),
            validate_formats=True,
            ignore_unknown_formats=True,
            pattern_options=options,
        )
    except (ValueError, rs.ValidationError, rs.ReferencingError) as error:
        return _line(f"it is not a valid JSON schema: {error}")
    if text is None:
        return ""
    try:
        instance = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _line(f"it is not JSON: {error}")
    try:
        found = next(validator.iter_errors(instance), None)
    except Exception as error:
        return _line(f"the check failed: {error}")
    if found is None:
        return ""
    place = "".join(f"[{part!r}]" for part in found.instance_path)
    return _line(f"{place}: {found.message}" if place else found.message)


def _line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= MAX_REASON else line[:MAX_REASON] + " …"


if __name__ == "__main__":
    main()
