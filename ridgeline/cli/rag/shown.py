"""What `ridgeline rag ask` prints: found chunks, explanations, citations."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.retrieval.client import FileAnswer, Found, SearchAnswer, VectorStoreClient

LONGEST = 160  # characters of a chunk or a quote in a line


def found_lines(found: Sequence[Found]) -> str:
    if not found:
        return "Nothing was found."
    return "\n".join(
        f"{number:>2}. {one.score:.3f}  {named(one)}  {short(one.text)}"
        for number, one in enumerate(found, 1)
    )


def explained(answer: SearchAnswer) -> str:
    """Each candidate with its rank and score in each leg, what the filter said, and why it was left out."""
    lines = []
    for number, one in enumerate(answer.found, 1):
        lines.append(f"{number:>2}. {one.score:.3f}  {named(one)}  {short(one.text)}")
        lines += _legs(one)
    if answer.left_out:
        lines.append(f"left out: {len(answer.left_out)}")
        for one in answer.left_out:
            why = (one.explained or {}).get("dropped") or "no reason given"
            lines.append(f"  - {named(one)}: {why}")
            lines += _legs(one)
    return "\n".join(lines) or "Nothing was found."


def _legs(one: Found) -> list[str]:
    told = one.explained or {}
    lines = []
    for leg in told.get("legs", ()):
        rank = "-" if leg["rank"] is None else leg["rank"]
        score = "-" if leg["score"] is None else f"{leg['score']:.4f}"
        lines.append(f"      {leg['name']:<14} rank {rank:<4} score {score:<8} {leg['reason']}")
    if told.get("filter"):
        lines.append(f"      filter: {told['filter']}")
    return lines


def cited(client: VectorStoreClient, answer: FileAnswer) -> str:
    """The citations of an answer, each compared with the text of its file."""
    lines = [] if answer.is_complete else ["Some files are still being read: ask again for all of them."]
    if not answer.quotes:
        lines.append(
            "No sentence of the answer is supported by a passage." if answer.found else "Nothing was found."
        )
    texts: dict[str, str] = {}
    seen = set()
    for quote in answer.quotes:
        place = (quote.file_id, quote.begin, quote.end)
        if place in seen:
            continue
        seen.add(place)
        if quote.file_id not in texts:
            texts[quote.file_id] = client.text(quote.store_id, quote.file_id)
        text = texts[quote.file_id]
        line = text.count("\n", 0, quote.begin) + 1
        path = next((named(one) for one in answer.found if one.file_id == quote.file_id), quote.filename)
        mark = "" if text[quote.begin : quote.end] == quote.quote else "  (the file has changed)"
        lines.append(f'{path}:{line}  "{short(quote.quote)}"  [{quote.begin}:{quote.end}]{mark}')
    usage = answer.usage
    if usage:
        held = (usage.get("input_tokens_details") or {}).get("cached_tokens", 0)
        lines.append(f"{usage['output_tokens']} tokens · prompt {usage['input_tokens']} ({held} cached)")
    return "\n".join(lines)


def named(one: Found) -> str:
    """The path that `rag add` was given, else the file's name."""
    path = one.attributes.get("path")
    return path if isinstance(path, str) else one.filename


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
