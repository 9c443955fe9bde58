"""The prompt of an answer from files: what never changes first, then the passages, the question last.

A prefix cache holds the rules for all requests, the conversation so far for its next turn, and the passages
for another question about them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.retrieval.answering.passages import Passage

RULES = (
    "Answer the question with the numbered passages of the user's files. Behind each sentence put the number "
    "of the passage that supports it, like [1]. If the passages do not answer the question, say so."
)
NOTHING = "No passage of the user's files fits the question."


def system_text(instructions: str | None) -> str:
    return f"{instructions}\n\n{RULES}" if instructions else RULES


def user_text(passages: Sequence[Passage], question: str) -> str:
    if not passages:
        return f"{NOTHING}\n\nQuestion: {question}"
    shown = "\n\n".join(f"[{i}] {one.filename}\n{one.text.strip()}" for i, one in enumerate(passages, 1))
    return f"Passages:\n\n{shown}\n\nQuestion: {question}"
