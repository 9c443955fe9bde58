"""How many schemas of a folder are served, and whether what is written under them is valid.

    python benchmarks/schema_acceptance.py FOLDER [--walks 3] [--json out.json]

FOLDER holds JSON schemas, one a file, in folders by kind (of jsonschemabench, of SchemaStore, your own).
Each is read as the server reads it, compiled under the trial's limits, and written under at random; each
finished text that passes the server's own check is held to the original schema by the package jsonschema.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar.conformance import fault
from ridgeline.engine.grammar.keywords import schema_grammar
from ridgeline.engine.grammar.library import Compiled, Vocabulary, compile_grammar
from ridgeline.engine.grammar.masks import allowed_tokens, mask_words
from ridgeline.engine.grammar.trial import Trial
from ridgeline.models.files.pull import ensure
from ridgeline.models.spec.read_spec import read_spec

WALK_TOKENS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--walks", type=int, default=3, help="texts written under each schema (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    path = ensure("smollm2-135m").path
    spec = read_spec(path)
    vocabulary = Vocabulary(path, spec.vocab_size, spec.eos_ids)
    trial = Trial(path, spec.vocab_size, spec.eos_ids)
    counts: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for file in sorted(arguments.folder.rglob("*.json")):
        count = counts.setdefault(file.parent.name, Counter())
        count["schemas"] += 1
        schema = json.loads(file.read_text())
        try:
            grammar = trial.survived(schema_grammar(schema))
            compiled = compile_grammar(vocabulary, grammar)
        except InvalidRequest as error:
            reasons[error.message[:80]] += 1
            continue
        count["served"] += 1
        count["enforced"] += not grammar.check
        for seed in range(arguments.walks):
            text = walk(vocabulary, compiled, random.Random(f"{file.name} {seed}"))
            if text is None:
                count["unfinished"] += 1
            elif grammar.check and fault([grammar.check, text]):
                count["told"] += 1
            else:
                count["valid" if is_valid(schema, text) else "violations"] += 1
    report(counts, reasons)
    if arguments.json:
        arguments.json.write_text(json.dumps({"groups": counts, "refused": reasons}, indent=1))


def walk(vocabulary: Vocabulary, compiled: Compiled, draws: random.Random) -> str | None:
    """A text of the language, by choices that tend towards its end; None if it does not come to one."""
    matcher = compiled.matcher()
    mask = np.zeros(mask_words(vocabulary.size), np.int32)
    tokens: list[int] = []
    ends = set(vocabulary.eos_ids)
    for _ in range(WALK_TOKENS):
        if matcher.fill(mask, frozenset(), ignores_eos=False) is not None:
            return None
        allowed = np.flatnonzero(allowed_tokens(mask, vocabulary.size))
        if ends & set(allowed[:64].tolist()):
            break
        short = allowed[allowed < 400]  # letters and signs: they close what is open
        among = short if short.size and draws.random() < 0.9 else allowed
        tokens.append(int(among[draws.randrange(among.size)]))
        if matcher.advance(tokens[-1]):
            break
    else:
        return None
    text: str = vocabulary.tokenizer.decode_bytes(tokens).decode()
    return text


def is_valid(schema: Any, text: str) -> bool:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return not any(True for _ in validator(schema).iter_errors(json.loads(text)))


def report(counts: dict[str, Counter[str]], reasons: Counter[str]) -> None:
    columns = ("schemas", "served", "enforced", "valid", "told", "violations", "unfinished")
    print(f"{'':24}" + "".join(f"{name:>12}" for name in columns))
    for group, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"{group[:24]:24}" + "".join(f"{count[name]:12}" for name in columns))
    for reason, times in reasons.most_common(12):
        print(f"refused {times:4}  {reason}")
    print("told: texts that only the check of the finished answer refuses; unfinished: not ended in time")


if __name__ == "__main__":
    main()
