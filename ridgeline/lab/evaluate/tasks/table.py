"""The tasks by name: data file, form of the prompt, metrics. Definitions are lm-eval's.

Where the stored data differs from lm-eval's (a comma, a cut set), the task's note says so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate.tasks.items import (
    NEEDS_LOGPROBS,
    Choices,
    Contexts,
    Item,
    LastWord,
    Passage,
    Program,
    Question,
)
from ridgeline.lab.evaluate.tasks.own import own_items
from ridgeline.lab.evaluate.tasks.read import Line, find_file, jsonl, plain_text

SHOTS = 5  # of GSM8K and SVAMP
SHOTS_STOPS = ("Question:", "</s>", "<|im_end|>")
HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
WINDOW_WORDS = 384
MMLU_SHOTS = 5
LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True)
class Task:
    """primary: the metric whose outcome per item is tested in pairs ("" for texts: their tokens are)."""

    name: str
    items: tuple[Item, ...]
    primary: str
    note: str = ""

    @property
    def needs_logprobs(self) -> bool:
        return isinstance(self.items[0], NEEDS_LOGPROBS)

    @property
    def is_text(self) -> bool:
        return isinstance(self.items[0], Passage)


@dataclass(frozen=True, slots=True)
class Definition:
    files: tuple[str, ...]
    read: Callable[[str, Path], list[Item]]
    primary: str
    note: str = ""


def load_task(name: str, folder: Path | None) -> Task:
    """A task of the table, or a user's file by its path."""
    if name.endswith((".jsonl", ".jsonl.gz")):
        path = Path(name).expanduser()
        items = own_items(path)
        return Task(path.name.removesuffix(".gz").removesuffix(".jsonl"), tuple(items), _own_primary(items))
    known = TASKS.get(name)
    if known is None:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise BadInput(f"unknown task {name!r}; {hint}known are {', '.join(TASKS)}, and files *.jsonl")
    path = find_file(folder, name, known.files)
    items = known.read(name, path)
    if not items:
        raise BadInput(f"task {name}: {path} has no items")
    return Task(name, tuple(items), known.primary, known.note)


def _own_primary(items: list[Item]) -> str:
    return "" if isinstance(items[0], Passage) else "exact_match" if isinstance(items[0], Question) else "acc"


# ---- multiple choice ----


def _as_question(name: str, path: Path) -> list[Item]:
    """ARC and PIQA: `Question: …\\nAnswer:`; the stored query lacks the second line."""
    return [_choices(name, line, line.text("query").rstrip() + "\nAnswer:") for line in jsonl(path)]


def _as_stored(name: str, path: Path) -> list[Item]:
    return [_choices(name, line, line.text("query").rstrip()) for line in jsonl(path)]


def _choices(name: str, line: Line, prompt: str) -> Item:
    choices = line.texts("choices", fewest=2)
    return Choices(f"{name}/{line.number}", prompt, choices, line.place("gold", len(choices)))


def _mmlu(name: str, path: Path) -> list[Item]:
    """Fields question, choices, answer (index from 0) and subject. Five shots of the subject from dev.jsonl
    beside the file; without it none."""
    dev = path.parent / "dev.jsonl"
    shots: dict[str, list[str]] = {}
    for line in jsonl(dev) if dev.is_file() else ():
        of_subject = shots.setdefault(line.text("subject"), [])
        if len(of_subject) < MMLU_SHOTS:
            choices = line.texts("choices", fewest=2)
            of_subject.append(f"{_lettered(line)} {LETTERS[line.place('answer', len(choices))]}\n\n")
    found: list[Item] = []
    for line in jsonl(path):
        subject, choices = line.text("subject"), line.texts("choices", fewest=2)
        about = subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        prompt = head + "".join(shots.get(subject, ())) + _lettered(line)
        gold = line.place("answer", len(choices))
        found.append(Choices(f"{name}/{line.number}", prompt, tuple(LETTERS[: len(choices)]), gold))
    return found


def _lettered(line: Line) -> str:
    choices = zip(LETTERS, line.texts("choices", fewest=2), strict=False)
    shown = "".join(f"{letter}. {choice}\n" for letter, choice in choices)
    return f"{line.text('question').strip()}\n{shown}Answer:"


def _hellaswag(name: str, path: Path) -> list[Item]:
    """Fields activity_label, ctx_a, ctx_b, endings and label (index from 0; published as text)."""
    found: list[Item] = []
    for line in jsonl(path):
        endings = tuple(_without_marks(ending) for ending in line.texts("endings", fewest=2))
        context = f"{line.text('ctx_a')} {line.text('ctx_b').capitalize()}"
        prompt = _without_marks(f"{line.text('activity_label')}: {context}")
        found.append(Choices(f"{name}/{line.number}", prompt, endings, line.place("label", len(endings))))
    return found


def _without_marks(text: str) -> str:
    """lm-eval's cleaning of WikiHow's marks: [title], [step] and the like."""
    cleaned = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return cleaned.replace("  ", " ")


def _contexts(name: str, path: Path) -> list[Item]:
    found: list[Item] = []
    for line in jsonl(path):
        contexts = line.texts("context_options", fewest=2)
        gold = line.place("gold", len(contexts))
        found.append(Contexts(f"{name}/{line.number}", contexts, " " + line.text("continuation"), gold))
    return found


def _last_word(name: str, path: Path) -> list[Item]:
    return [
        LastWord(f"{name}/{line.number}", line.text("context"), " " + line.text("continuation"))
        for line in jsonl(path)
    ]


# ---- generated answers ----


def _gsm8k(name: str, path: Path) -> list[Item]:
    """Five shots from train.jsonl; without it, the last five of the test file, which are then not asked."""
    return _solved(name, path, path.parent / "train.jsonl", _gsm8k_parts)


def _gsm8k_parts(line: Line) -> tuple[str, str]:
    return line.text("question"), line.text("answer")


def _svamp(name: str, path: Path) -> list[Item]:
    """GSM8K's form: the equation is the solution, and the answer follows ####. Shots as there."""
    return _solved(name, path, path.with_name("svamp_train.jsonl"), _svamp_parts)


def _svamp_parts(line: Line) -> tuple[str, str]:
    return line.text("context"), f"{line.text('chain_of_thought')}\n#### {line.text('answer')}"


def _solved(name: str, path: Path, train: Path, parts: Callable[[Line], tuple[str, str]]) -> list[Item]:
    """Questions after SHOTS solved ones. parts: a line's question and its solution, which ends in #### N."""
    asked = list(jsonl(path))
    if train.is_file():
        shots = list(jsonl(train))[:SHOTS]
    else:
        asked, shots = asked[:-SHOTS], asked[-SHOTS:]
    solved = (parts(shot) for shot in shots)
    shown = "".join(f"Question: {question}\nAnswer: {solution}\n\n" for question, solution in solved)
    found: list[Item] = []
    for line in asked:
        question, solution = parts(line)
        prompt = f"{shown}Question: {question}\nAnswer:"
        found.append(Question(f"{name}/{line.number}", prompt, solution, "strict_number", SHOTS_STOPS))
    return found


def _humaneval(name: str, path: Path) -> list[Item]:
    return [
        Program(
            line.text("task_id"),
            line.text("prompt"),
            line.text("entry_point"),
            line.text("test"),
            HUMANEVAL_STOPS,
        )
        for line in jsonl(path)
    ]


# ---- text ----


def _wikitext(name: str, path: Path) -> list[Item]:
    return list(passages(name, plain_text(path)))


def passages(name: str, text: str, window_words: int = WINDOW_WORDS) -> list[Passage]:
    """The articles of a text in windows of whole words; context restarts at each window.

    Articles begin at wikitext's top headings (` = Title = `); a text without them is one article.
    """
    articles: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        words = line.split()
        top = len(words) > 2 and words[0] == words[-1] == "=" and words[1] != "="
        if top and any(part.strip() for part in articles[-1]):
            articles.append([])
        articles[-1].append(line)
    found = []
    for number, lines in enumerate(articles, start=1):
        for place, window in enumerate(_windows("".join(lines), window_words), start=1):
            found.append(Passage(f"{name}/{number}.{place}", window))
    return found


def _windows(article: str, window_words: int) -> list[str]:
    pieces = article.split(" ")
    windows, current, count = [], [], 0
    for piece in pieces:
        current.append(piece)
        count += bool(piece.strip())
        if count == window_words:
            windows.append(" ".join(current))
            current, count = [""], 0  # the space before the next word belongs to the next window
    rest = " ".join(current)
    if rest.strip() or not windows:
        windows.append(rest)
    else:
        windows[-1] += rest
    return [window for window in windows if window.strip()]


_ICL = ("icl-evals/{0}.jsonl", "{0}.jsonl")


def _icl(
    file: str, read: Callable[[str, Path], list[Item]], primary: str = "acc", note: str = ""
) -> Definition:
    return Definition(tuple(name.format(file) for name in _ICL), read, primary, note)


TASKS: dict[str, Definition] = {
    "perplexity": Definition(
        ("wikitext-2/test.txt", "wikitext.txt"),
        _wikitext,
        "",
        f"windows of {WINDOW_WORDS} words; lm-eval's windows are as long as the model's context. A tokenised "
        "wikitext with <unk> does not compare with figures on wikitext-2-raw",
    ),
    "mmlu": Definition(
        ("mmlu/test.jsonl", "mmlu.jsonl"),
        _mmlu,
        "acc",
        "up to 5 shots of the subject, from dev.jsonl beside it",
    ),
    "hellaswag": Definition(("hellaswag/validation.jsonl", "hellaswag.jsonl"), _hellaswag, "acc_norm"),
    "arc_easy": _icl("arc_easy", _as_question),
    "arc_challenge": _icl("arc_challenge", _as_question, "acc_norm"),
    "piqa": _icl("piqa", _as_question),
    "openbookqa": _icl("openbook_qa", _as_stored, "acc_norm"),
    "copa": _icl("copa", _as_stored, note="the stored queries have a comma before because and therefore"),
    "commonsense_qa": _icl(
        "commonsense_qa",
        _as_stored,
        note="cut to four choices given as letters: does not compare with published figures",
    ),
    "winogrande": _icl("winogrande", _contexts),
    "wsc273": _icl("winograd_wsc", _contexts),
    "lambada_openai": _icl("lambada_openai", _last_word),
    "gsm8k": Definition(
        ("gsm8k/test.jsonl", "gsm8k.jsonl"),
        _gsm8k,
        "exact_match",
        "5 shots; without a train.jsonl they are the last five of the test file, which are not asked",
    ),
    "svamp": _icl(
        "svamp",
        _svamp,
        "exact_match",
        "GSM8K's form with the equation as the solution; 5 shots; without a svamp_train.jsonl they are the "
        "last five of the file, which are not asked",
    ),
    "humaneval": Definition(
        ("humaneval/HumanEval.jsonl.gz", "humaneval/HumanEval.jsonl", "HumanEval.jsonl.gz"),
        _humaneval,
        "pass@1",
    ),
}
