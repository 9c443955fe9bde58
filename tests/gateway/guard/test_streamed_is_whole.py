"""Streamed = whole: a text in any pieces has the findings and the restored values that it has as a whole."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ridgeline.gateway.guard.config import DEFAULT_REGIONS, KINDS
from ridgeline.gateway.guard.fold import fold
from ridgeline.gateway.guard.json_text import JsonText
from ridgeline.gateway.guard.phones import PhoneDetector
from ridgeline.gateway.guard.placeholders import RestoredText, Vault
from ridgeline.gateway.guard.scanner import ScannedText, Scanner, built_in
from ridgeline.gateway.guard.zones import LONGEST, first_cut
from tests.gateway.guard.corpus import corpus

SCANNER = Scanner(built_in(KINDS, PhoneDetector(DEFAULT_REGIONS, False)))

# Pieces that findings are made of, and what stands between them, in every order.
PIECES = st.sampled_from([
    "a@b.com", "jo", "@", "x.org", "%40", ".", ",", " ", "  ", "   ", "\n", "\t", "\u00a0", "(", ")", "+",
    "-", "/", ":", "::", "=", '"', "'",
    "+49 30", "1234567", "415", "555-", "2671", "0", "4111 1111 ", "1111 1111", "4111111111111111", "GB29 ",
    "NWBK ", "6016 1331", " 9268 19",
    "DE89", "370400440532013000", "192.168", ".0.1", "fe80::1", "2001:db8:", "password", "passw", " is ",
    "hunter2", "api_key", "key", "secret: ",
    "Bearer ", "abcdefgh12345678", "sk-abcdefghijklmnop1234", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    "postgres://u:", "pw1@h/db", "call ", "~", "8Q~", " lautet ", "correct horse", "a:b:", "f:",
    "phone", "tel. ", "电话", "电", "话", "密码", "是", "，", "。", "word", "the quick ", "-----BEGIN ",
    "RSA PRIVATE KEY-----", "\nMIIEowIBAAKCAQEA\n",
    "-----END RSA PRIVATE KEY-----", "İ", "é", "１２３", "123-45-6789", "2024-05-06",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
])  # fmt: skip
TEXTS = st.lists(PIECES, max_size=24).map("".join)


def mark(kind: str, value: str) -> str:
    return f"[{kind}:{value}]"


def streamed(channel, text: str, cuts: list[int]) -> str:
    out, at = "", 0
    for cut in sorted({min(cut, len(text)) for cut in cuts}):
        out += channel.feed(text[at:cut])
        at = cut
    return out + channel.feed(text[at:]) + channel.finish()


CUTS = st.lists(st.integers(0, 200), max_size=12)


@settings(max_examples=400, deadline=None)
@given(TEXTS, CUTS)
@example("电话 13812345678", [1])
@example("-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n-----END RSA PRIVATE KEY-----", [11])
@example("mail a@b.com now", [5, 6, 7, 8])
def test_findings_do_not_depend_on_where_a_text_is_divided(text, cuts):
    whole = streamed(ScannedText(SCANNER, mark), text, [])
    assert streamed(ScannedText(SCANNER, mark), text, cuts) == whole
    assert streamed(ScannedText(SCANNER, mark), text, list(range(len(text)))) == whole
    assert SCANNER.replaced(text, mark) == whole


LINES = Scanner(built_in(KINDS, None), {"project": re.compile("quick +word|word the")})


@settings(max_examples=150, deadline=None)
@given(TEXTS, CUTS)
def test_patterns_over_lines_do_not_depend_on_it_either(text, cuts):
    whole = LINES.replaced(text, mark)
    assert streamed(ScannedText(LINES, mark), text, cuts) == whole
    assert streamed(ScannedText(LINES, mark), text, list(range(len(text)))) == whole


@settings(max_examples=400, deadline=None)
@given(TEXTS)
@example('my password is "correct horse battery" he said: so')
@example("a:b:c:d:e:f:a:b")
@example("98n8Q~Vf_KZJsW~FcvHI6N3saBHya.uhdM_xAviL 98n8Q~Vf_KZJsW~FcvHI6N3saBHya.uhdM_xAviL")
def test_the_quick_look_leaves_out_no_zone_with_a_finding(text):
    folded, every, at = fold(text), [], 0
    while at < len(folded):
        end = first_cut(folded, at, len(folded)) or len(folded)
        every += SCANNER.zone(folded, at, end)
        at = end
    assert SCANNER.findings(text) == every


def test_every_split_of_every_text_of_the_corpus_gives_the_whole():
    for sample in corpus(90, seed=3):
        text = sample.text[:400]
        whole = SCANNER.replaced(text, mark)
        step = max(len(text) // 40, 1)
        for cut in range(0, len(text), step):
            assert streamed(ScannedText(SCANNER, mark), text, [cut]) == whole


@pytest.mark.parametrize("filler", ["a", "1 ", "7", "ab12 "])
def test_a_zone_that_never_ends_is_cut_by_force_at_the_same_place_however_it_comes(filler):
    text = (filler * LONGEST)[: LONGEST * 2] + " a@b.com " + "4111 1111 1111 1111 " + filler * 40
    whole = SCANNER.replaced(text, mark)
    assert "[email:a@b.com]" in whole
    rng = random.Random(5)
    cuts = [rng.randrange(len(text)) for _ in range(7)]
    assert streamed(ScannedText(SCANNER, mark), text, cuts) == whole


def test_what_is_held_back_is_no_more_than_the_word_that_may_grow():
    channel = ScannedText(SCANNER, mark)
    assert channel.feed("The quick brown") == "The quick "
    assert channel.feed(" fox") == "brown "
    assert channel.feed(" at a@b") == "fox at "
    assert channel.feed(".com, or") == "[email:a@b.com], "


def test_what_is_held_back_is_bounded():
    channel = ScannedText(SCANNER, mark)
    out = sum(len(channel.feed("a" * 1000)) for _ in range(100))
    assert out > 100_000 - LONGEST - 1000


VAULT = Vault()
VALUES = {VAULT.placeholder("email", "a@b.com"): "a@b.com", VAULT.placeholder("secret", 'x"\\\n€'): 'x"\\\n€'}
TAGS = st.lists(
    st.sampled_from([
        "<EMAIL_1>", "<SECRET_1>", "<email_1>", "< Email 1 >", "&lt;EMAIL_1&gt;", "\\<EMAIL\\_1\\>",
        "<EMAIL_2>", "<", ">", "&", "&lt", ";", "\\",
        "EMAIL", "_1", " ", "<b>", "text", "<EM", "AIL_1>", "&g", "t;", "<div class=", "1",
    ]),
    max_size=14,
).map("".join)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(TAGS, CUTS)
@example("<foo\\<EMAIL_1>", [5])
@example("<foo&lt;EMAIL_1&gt;", [5])
def test_placeholders_are_restored_wherever_a_text_is_divided(text, cuts):
    whole = VAULT.restored(text)
    assert streamed(RestoredText(VAULT), text, cuts) == whole
    assert streamed(RestoredText(VAULT), text, list(range(len(text)))) == whole


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.just(4111111111111111) | TEXTS | TAGS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just("password"), inner, max_size=3)
    ),
    max_leaves=8,
)


def arguments() -> JsonText:
    quoted = lambda kind, value: f'"{kind}"'  # noqa: E731
    return JsonText(
        lambda key: ScannedText(SCANNER, mark, f"{key} = " if key == "password" else ""),
        lambda key: ScannedText(SCANNER, quoted),
    )


@settings(max_examples=200, deadline=None)
@given(JSON_VALUES, st.booleans(), CUTS)
@example({"card": -4111111111111111}, False, [10])
def test_arguments_stay_json_and_do_not_depend_on_where_they_are_divided(value, ascii_only, cuts):
    text = json.dumps(value, ensure_ascii=ascii_only)
    whole = streamed(arguments(), text, [])
    json.loads(whole)
    assert streamed(arguments(), text, cuts) == whole
    assert streamed(arguments(), text, list(range(len(text)))) == whole


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), CUTS)
def test_arguments_that_are_no_json_go_through_as_well(text, cuts):
    assert streamed(arguments(), text, cuts) == streamed(arguments(), text, [])


def test_a_restored_value_is_escaped_where_it_stands_in_json():
    channel = JsonText(lambda key: RestoredText(VAULT), None)
    text = json.dumps({"to": "<SECRET_1>", "cc": "<EMAIL_1>"}).replace("<", "\\u003c")
    out = streamed(channel, text, list(range(len(text))))
    assert json.loads(out) == {"to": 'x"\\\n€', "cc": "a@b.com"}
