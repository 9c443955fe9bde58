"""Texts, queries and judgements for retrieval benchmarks, from files on this machine.

Of three kinds: a folder with Cranfield's cran.all.1400, cran.qry and cranqrel; a folder in BEIR's layout
(corpus.jsonl, queries.jsonl, qrels/test.tsv); a file of wikitext, whose headings are the queries. A
paragraph of a heading's section is relevant (2), and so is one of the same article (1). No paragraph contains
its headings.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

Texts = dict[str, str]
Judged = dict[str, dict[str, float]]


def collection(place: Path, most_queries: int) -> tuple[Texts, Texts, Judged]:
    if place.is_file():
        read = sections(place)
    elif (place / "corpus.jsonl").exists():
        read = beir(place)
    else:
        read = cranfield(place)
    texts, queries, judged = read
    asked = [name for name, text in queries.items() if judged.get(name) and text.strip()]
    chosen = sorted(random.Random(1).sample(asked, min(most_queries, len(asked))), key=asked.index)
    return texts, {name: queries[name] for name in chosen}, {name: judged[name] for name in chosen}


def cranfield(folder: Path) -> tuple[Texts, Texts, Judged]:
    """Queries of cranqrel are numbered by their place in cran.qry."""
    records = re.split(r"^\.I \d+\s*$", (folder / "cran.all.1400").read_text(errors="replace"), flags=re.M)[
        1:
    ]
    texts = {str(i): re.sub(r"^\.[TABW]\s*$", " ", one, flags=re.M) for i, one in enumerate(records, start=1)}
    asked = re.split(r"^\.I \d+\s*$", (folder / "cran.qry").read_text(errors="replace"), flags=re.M)[1:]
    queries = {str(i): one.replace(".W", " ", 1) for i, one in enumerate(asked, start=1)}
    judged: Judged = {}
    for line in (folder / "cranqrel").read_text().splitlines():
        query, text, grade = line.split()[:3]
        # Grades 1 (best) to 4; 5 and -1 stand for no relevance.
        if grade in ("1", "2", "3", "4"):
            judged.setdefault(query, {})[text] = 5.0 - float(grade)
    return texts, queries, judged


def beir(folder: Path) -> tuple[Texts, Texts, Judged]:
    corpus = [json.loads(line) for line in (folder / "corpus.jsonl").read_text("utf-8").splitlines()]
    texts = {one["_id"]: f"{one.get('title', '')} {one['text']}".strip() for one in corpus}
    asked = [json.loads(line) for line in (folder / "queries.jsonl").read_text("utf-8").splitlines()]
    judged: Judged = {}
    for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, text, grade = line.split("\t")
        if float(grade) > 0:
            judged.setdefault(query, {})[text] = float(grade)
    return texts, {one["_id"]: one["text"] for one in asked}, judged


def sections(file: Path, least_words: int = 20) -> tuple[Texts, Texts, Judged]:
    texts: Texts = {}
    queries: Texts = {}
    judged: Judged = {}
    headings: list[str] = []
    of_article: dict[str, list[str]] = {}
    for line in map(str.strip, file.read_text("utf-8").replace("<unk>", "").splitlines()):
        if heading := re.fullmatch(r"((?:= )+)(.+?)((?: =)+)", line):
            depth = heading[1].count("=")
            headings = [*headings[: depth - 1], heading[2]]
        elif headings and len(line.split()) >= least_words:
            text, query = str(len(texts)), " > ".join(headings)
            texts[text] = line
            of_article.setdefault(headings[0], []).append(text)
            queries[query] = " ".join(headings)  # the article's name before the section's
            judged.setdefault(query, {})[text] = 2.0
    for query, found in judged.items():
        for text in of_article[query.split(" > ")[0]]:
            found.setdefault(text, 1.0)
    return texts, queries, judged
