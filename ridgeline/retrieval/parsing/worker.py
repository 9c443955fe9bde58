"""The process that reads one HTML or PDF file: `worker.py KIND PATH CPU_S MEMORY_BYTES TEXT_BYTES`.

Run by `isolated` as a script, so that it imports nothing of this package. The text goes to stdout as UTF-8.
Exit codes: 3 the file is invalid, 4 it cannot be read here; the reason is on stderr.
"""

from __future__ import annotations

import resource
import sys
from html.parser import HTMLParser

INVALID, UNSUPPORTED = 3, 4


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


# ── HTML ─────────────────────────────────────────────────────────────────────────────────────────────────

_SKIPPED = {"script", "style", "template", "noscript", "svg", "head", "iframe", "object", "select"}
# Tags whose content stands on lines of its own; of these, the ones with a blank line around them.
_PARAGRAPHS = frozenset(
    "article blockquote dl figure h1 h2 h3 h4 h5 h6 ol p pre section table ul title".split()  # noqa: SIM905
)
_BLOCKS = _PARAGRAPHS | frozenset(
    "address aside body dd details div dt fieldset figcaption footer form header hr li main nav"  # noqa: SIM905
    " summary tbody tfoot thead tr".split()
)


class TextOfHtml(HTMLParser):
    """The visible text: blocks on lines of their own, paragraphs with a blank line between them."""

    def __init__(self, most_characters: int) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._left = most_characters
        self._skipping: list[str] = []
        self._preformatted = 0
        self._breaks = 2  # line breaks at the end of what was written; nothing precedes the first text
        self._space = False  # between the last word and the next

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIPPED:
            self._skipping.append(tag)
        elif tag == "title" and self._skipping == ["head"]:
            self._skipping.clear()
        if self._skipping:
            return
        if tag == "pre":
            self._preformatted += 1
        if tag == "br":
            self._write("\n")
            self._breaks = min(self._breaks + 1, 2)
        elif tag in ("td", "th"):
            self._space = True
        elif tag in _BLOCKS:
            self._break(2 if tag in _PARAGRAPHS else 1)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._skipping:
            del self._skipping[self._skipping.index(tag) :]
            return
        if self._skipping:
            return
        if tag == "pre":
            self._preformatted = max(0, self._preformatted - 1)
        if tag in _BLOCKS:
            self._break(2 if tag in _PARAGRAPHS else 1)
        if tag == "title":
            self._skipping.append("head")

    def handle_data(self, data: str) -> None:
        if self._skipping:
            return
        if self._preformatted:
            self._write(data)
            self._breaks = 0 if data.strip() else self._breaks
            return
        words = data.split()
        if data[:1].isspace():
            self._space = True
        if not words:
            return
        before = " " if self._space and not self._breaks else ""
        self._write(before + " ".join(words))
        self._breaks, self._space = 0, data[-1:].isspace()

    def _break(self, wanted: int) -> None:
        if self._breaks < wanted and self._parts:
            self._write("\n" * (wanted - self._breaks))
            self._breaks = wanted
        self._space = False

    def _write(self, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise Refused(INVALID, "the file has more text than is read of one file")
        self._parts.append(text)

    def text(self) -> str:
        return "".join(self._parts).strip() + "\n"


def html_text(path: str, most: int) -> str:
    with open(path, "rb") as file:
        data = file.read()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        page = data.decode("utf-16", "replace")
    else:
        page = data.decode("utf-8-sig", "replace")
    reader = TextOfHtml(most)
    reader.feed(page)
    reader.close()
    return reader.text()


# ── PDF ──────────────────────────────────────────────────────────────────────────────────────────────────


def pdf_text(path: str, most: int) -> str:
    try:
        import pypdfium2
    except ModuleNotFoundError:
        raise Refused(UNSUPPORTED, "PDF files need pypdfium2: pip install 'ridgeline[retrieval]'") from None
    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        what = "it needs a password" if "assword" in str(error) else str(error)
        raise Refused(INVALID, f"this is not a PDF that can be read: {what}") from None
    pages, left = [], most
    for page in document:
        text = page.get_textpage().get_text_range().replace("\r\n", "\n").replace("\x00", "").strip()
        page.close()
        left -= len(text)
        if left < 0:
            raise Refused(INVALID, "the file has more text than is read of one file")
        if text:
            pages.append(text)
    if not pages:
        raise Refused(INVALID, "the PDF has no text; its pages may be pictures, which are not read")
    return "\n\n".join(pages) + "\n"


def main(arguments: list[str]) -> int:
    kind, path = arguments[:2]
    cpu_s, memory_bytes, text_bytes = map(int, arguments[2:])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it writes to pipes only
    try:
        text = html_text(path, text_bytes) if kind == "html" else pdf_text(path, text_bytes)
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.flush()
    except Refused as refused:
        sys.stderr.write(str(refused))
        return refused.code
    except MemoryError:
        sys.stderr.write(
            f"the file needs more than {memory_bytes >> 20} MiB of memory, the limit for one file"
        )
        return INVALID
    except RecursionError:
        sys.stderr.write("the file is nested too deeply")
        return INVALID
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
