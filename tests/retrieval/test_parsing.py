"""Files to texts: each kind, and files that are damaged, hostile or of no known kind."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from ridgeline.retrieval.parsing.errors import InvalidFile, UnsupportedFile
from ridgeline.retrieval.parsing.isolated import DEFAULT_LIMITS, Limits
from ridgeline.retrieval.parsing.parse import parse


def pdf(pages: list[str], page_objects: str = "") -> bytes:
    """A PDF by hand: one line of text a page."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>")
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, text in enumerate(pages):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R"
            f" /Resources << /Font << /F1 3 0 R >> >> {page_objects} >>"
        )
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    return _assembled([item.encode("latin-1") for item in objects])


def _assembled(objects: list[bytes]) -> bytes:
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, item in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, item)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    for place in places:
        out += b"%010d 00000 n \n" % place
    out += b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(out)


def bomb(inflated: int) -> bytes:
    """A page whose content is `inflated` bytes of text operators, deflated twice."""
    line = b"BT /F1 12 Tf 72 720 Td (boom) Tj ET "
    content = zlib.compress(zlib.compress(line * (inflated // len(line)), 9), 9)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 5 0 R"
        b" /Resources << /Font << /F1 3 0 R >> >> >>",
        b"<< /Length %d /Filter [/FlateDecode /FlateDecode] >>\nstream\n%b\nendstream"
        % (len(content), content),
    ]
    return _assembled(objects)


def written(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def text_of(folder: Path, name: str, content: bytes | str, limits: Limits = DEFAULT_LIMITS) -> str:
    return parse(written(folder, name, content), name, limits)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "README", "a.unheard-of"])
def test_texts_are_kept_as_they_are(tmp_path: Path, name: str) -> None:
    content = "# Grüße\r\n\tx = 1  \n\n\n終わり\n"
    assert text_of(tmp_path, name, content) == content
    assert text_of(tmp_path, name, b"\xef\xbb\xbf" + content.encode()) == content
    assert text_of(tmp_path, name, b"\xff\xfe" + content.encode("utf-16-le")) == content


def test_html_is_its_visible_text(tmp_path: Path) -> None:
    page = """<html><head><title>A  page</title><style>p { color: red }</style></head>
<body><h1>Tea</h1><p>Green <b>tea</b>, &amp; <a href="x">black</a>.</p><script>alert("no")</script>
<ul><li>one<li>two</ul><pre>a
  b</pre><table><tr><td>1<td>2</tr></table></body></html>"""
    assert text_of(tmp_path, "a.html", page) == (
        "A page\n\nTea\n\nGreen tea, & black.\n\none\ntwo\n\na\n  b\n\n1 2\n"
    )


def test_jsonl_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """Other separators of lines are characters of a string, as `ensure_ascii=False` writes them."""
    for mark in "\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e":
        lines = [json.dumps({"text": f"one{mark}two"}, ensure_ascii=False), '{"text": "three"}']
        for end in ("\n", "\r\n"):
            assert text_of(tmp_path, "a.jsonl", end.join(lines) + end) == f"one{mark}two\n\nthree"


def test_escapes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    content = r'{"text": "a\ud800b\u0000c \ud83d\ude00"}'
    assert text_of(tmp_path, "a.jsonl", content) == "a\ufffdb\ufffdc \U0001f600"


def test_jsonl_records_are_read_line_by_line(tmp_path: Path) -> None:
    content = '{"text": "alone"}\n\n{"name": "tea", "price": 3, "tags": ["hot"]}\n"plain"\n'
    assert text_of(tmp_path, "a.jsonl", content) == 'alone\n\nname: tea\nprice: 3\ntags: ["hot"]\n\nplain'
    with pytest.raises(InvalidFile, match="line 2 is not JSON"):
        text_of(tmp_path, "a.jsonl", '{"a": 1}\n{"a": \n')


def test_pdf_pages_are_read_in_order(tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2")
    assert text_of(tmp_path, "a.pdf", pdf(["Green tea.", "Black tea."])) == "Green tea.\n\nBlack tea.\n"


@pytest.mark.parametrize(
    "content",
    [b"", b"%PDF-1.4\nnot really", b"%PDF-1.7\n" + b"\x00\xff" * 4000, pdf(["x"])[:200]],
    ids=["empty", "no objects", "noise", "cut off"],
)
def test_a_damaged_pdf_is_an_invalid_file(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("pypdfium2")
    with pytest.raises(InvalidFile):
        text_of(tmp_path, "a.pdf", content)


def test_a_pdf_that_fills_memory_fails_alone(tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2")
    limits = Limits(cpu_s=20, memory_bytes=256 << 20)
    with pytest.raises(InvalidFile):
        text_of(tmp_path, "a.pdf", bomb(400 << 20), limits)
    assert text_of(tmp_path, "b.pdf", pdf(["still reads"]), limits) == "still reads\n"


def test_a_parser_that_never_ends_is_ended_by_its_cpu_limit(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="signal"):
        text_of(tmp_path, "a.html", "<p>x</p>" * 4_000_000, Limits(cpu_s=1, memory_bytes=4 << 30))


def test_what_is_no_text_is_told_apart_from_what_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFile, match="docx"):
        text_of(tmp_path, "a.docx", b"PK")
    with pytest.raises(UnsupportedFile, match="not known"):
        text_of(tmp_path, "a.bin", b"\x80\x81")
    with pytest.raises(UnsupportedFile, match="not known"):
        text_of(tmp_path, "a.bin", b"a\x00b")
    with pytest.raises(InvalidFile, match="byte 3 is not UTF-8"):
        text_of(tmp_path, "a.txt", b"abc\xff")
    with pytest.raises(InvalidFile, match="at most 10"):
        text_of(tmp_path, "a.txt", "more than ten", Limits(text_bytes=10))
    with pytest.raises(InvalidFile, match="more text"):
        text_of(tmp_path, "a.html", "<p>more than ten", Limits(text_bytes=10))
