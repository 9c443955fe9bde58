"""Two grammar libraries, llguidance and xgrammar, on the same schemas with the same vocabulary.

Processor time to load, compile and find the mask of a token; how long others are held up meanwhile; what
is done with keywords that are not enforced; the JSON Schema test suite, where it is at hand. Each library
runs in a separate process, and so does each grammar that may not end. The reason for
docs/decisions/0009-grammar-library.md.

    python benchmarks/grammar_libraries.py [--suite ../shared/data/json-schema-test-suite] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.models.files.pull import ensure
from ridgeline.models.text.tokenizer import Tokenizer

LIBRARIES = ("llguidance", "xgrammar")
COMPILE_LIMIT_S = 10.0
WALKS, WALK_TOKENS = 6, 120
KEYWORDS: dict[str, Any] = {
    "not": {"type": "integer", "not": {"const": 3}},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 3}},
    "unevaluatedProperties": {"properties": {"a": {}}, "unevaluatedProperties": False, "type": "object"},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "if/then": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "oneOf (not disjoint)": {"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "format: idn-email": {"type": "string", "format": "idn-email"},
    "minProperties": {"type": "object", "minProperties": 2},
}


def large_schema() -> dict[str, Any]:
    """About 10 kB."""
    fields = {
        f"field_{i}": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "values": {"type": "array", "items": {"type": "number"}, "maxItems": 5},
                "kind": {"enum": ["red", "green", "blue", f"kind {i}"]},
            },
            "required": ["name", "kind"],
            "additionalProperties": False,
        }
        for i in range(38)
    }
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HOSTILE: dict[str, Any] = {
    "30 patterns in allOf": {"type": "string", "allOf": [{"pattern": f"a.*{i}.*b"} for i in range(30)]},
    "multipleOf 999983": {"type": "integer", "multipleOf": 999983},
    "5,000 optional properties": {"properties": {f"property{i}": {"type": "string"} for i in range(5000)}},
    "minItems 1e9": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "maxLength 1e9": {"type": "string", "maxLength": 10**9},
    "30 doubling $refs": {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)},
            "d30": {"type": "integer"},
        },
    },
}


class Llguidance:
    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        from ridgeline.engine.grammar.library import Vocabulary

        self._library = llguidance
        path = ensure("smollm2-135m").path
        self.vocabulary = Vocabulary(path, tokenizer.vocab_size, (tokenizer.eos_id or 0,))

    def compile(self, schema: Any) -> Any:
        grammar = self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = self._library.LLMatcher(self.vocabulary.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0][:150])
        return matcher

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def fill(self, matcher: Any, mask: Any) -> None:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class Xgrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._library = xgrammar
        words = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        info = xgrammar.TokenizerInfo(words, stop_token_ids=[tokenizer.eos_id])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Any) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

    def matcher(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def fill(self, matcher: Any, mask: Any) -> None:
        import torch

        matcher.fill_next_token_bitmask(torch.from_numpy(mask).unsqueeze(0))

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))

    def complete(self, matcher: Any) -> bool:
        # It is complete where its end token may come.
        copy = matcher.fork()
        return bool(copy.accept_token(copy.stop_token_ids[0]))


def measure(name: str, suite: Path | None) -> dict[str, Any]:
    tokenizer = Tokenizer.load(ensure("smollm2-135m").path)
    before = resident_mb()
    started = time.process_time()
    library: Any = Llguidance(tokenizer) if name == "llguidance" else Xgrammar(tokenizer)
    figures: dict[str, Any] = {
        "load_s": time.process_time() - started,
        "load_mb": resident_mb() - before,
        "imports_torch": "torch" in sys.modules,
    }
    for label, schema in (("small", SMALL), ("10 kB", large_schema()), ("any object", {"type": "object"})):
        library.compile(schema)
        times, stalls = [], []
        for _ in range(5):
            compiled, took, stall = timed(lambda schema=schema: library.compile(schema))
            times.append(1000 * took)
            stalls.append(1000 * stall)
        figures[f"compile {label}, ms"] = float(np.median(times))
        figures[f"others wait, {label}, ms"] = float(np.median(stalls))
        masks = 1000 * 1000 * np.array(walk_times(library, compiled, tokenizer))
        figures[f"mask {label}, µs"] = {
            "p50": float(np.percentile(masks, 50)),
            "p99": float(np.percentile(masks, 99)),
            "max": float(masks.max()),
        }
    figures["keywords"] = {label: verdict(library, schema, tokenizer) for label, schema in KEYWORDS.items()}
    if suite is not None:
        figures["suite"] = suite_figures(library, tokenizer, suite)
    return figures


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What came of it, how long it took, and how long at most another thread did not get to run."""
    worst, done = [0.0], threading.Event()

    def other() -> None:
        while not done.is_set():
            begun = time.perf_counter()
            time.sleep(0.0002)
            worst[0] = max(worst[0], time.perf_counter() - begun)

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.005)
    started = time.thread_time()
    found = work()
    took = time.thread_time() - started
    done.set()
    thread.join()
    return found, took, worst[0]


def walk_times(library: Any, compiled: Any, tokenizer: Tokenizer) -> list[float]:
    """Seconds for each mask along texts that are written at random."""
    draws, times = random.Random(0), []
    mask = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)
    for _ in range(WALKS):
        matcher = library.matcher(compiled)
        for _ in range(WALK_TOKENS):
            started = time.thread_time()
            library.fill(matcher, mask)
            times.append(time.thread_time() - started)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed != tokenizer.eos_id]
            if not allowed.size or not library.accept(matcher, int(allowed[draws.randrange(allowed.size)])):
                break
    return times


def accepts(library: Any, compiled: Any, tokenizer: Tokenizer, text: str) -> bool:
    matcher = library.matcher(compiled)
    tokens = tokenizer.encode(text, add_special=False, allow_special=False)
    return all(library.accept(matcher, token) for token in tokens) and library.complete(matcher)


WRONG = {
    "not": "3",
    "uniqueItems": "[1, 1]",
    "contains": "[1]",
    "unevaluatedProperties": '{"b": 1}',
    "dependentRequired": '{"a": 1}',
    "if/then": "1",
    "oneOf (not disjoint)": "3",
    "multipleOf": "8",
    "format: idn-email": '"nobody"',
    "minProperties": '{"a": 1}',
}


def verdict(library: Any, schema: Any, tokenizer: Tokenizer) -> str:
    label = next(name for name, known in KEYWORDS.items() if known is schema)
    try:
        compiled = library.compile(schema)
    except Exception:
        return "refused"
    return "IGNORED" if accepts(library, compiled, tokenizer, WRONG[label]) else "enforced"


def suite_figures(library: Any, tokenizer: Tokenizer, suite: Path) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for path in sorted((suite / "tests" / "draft2020-12").glob("*.json")):
        for case in json.loads(path.read_text()):
            try:
                compiled = library.compile(case["schema"])
            except Exception:
                counts["schemas refused"] += 1
                continue
            counts["schemas accepted"] += 1
            for test in case["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False)
                taken = accepts(library, compiled, tokenizer, text)
                valid = "valid" if test["valid"] else "invalid"
                counts[f"{valid} instances {'accepted' if taken else 'refused'}"] += 1
    return dict(counts)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def hostile(name: str, label: str) -> str:
    """The processor time that it takes to compile, in a process that ends itself when it takes too much."""
    command = [sys.executable, __file__, "--library", name, "--hostile", label]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -signal.SIGPROF:
        return f"more than {COMPILE_LIMIT_S:g} s"
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"ended by {done.returncode}"


def compile_hostile(name: str, label: str) -> None:
    tokenizer = Tokenizer.load(ensure("smollm2-135m").path)
    library: Any = Llguidance(tokenizer) if name == "llguidance" else Xgrammar(tokenizer)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_LIMIT_S)
    started = time.process_time()
    try:
        library.compile(HOSTILE[label])
        outcome = "compiled"
    except Exception as error:
        outcome = f"refused ({str(error)[:60]})"
    print(f"{outcome} in {time.process_time() - started:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", type=Path, help="a checkout of the JSON Schema test suite")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--library", choices=LIBRARIES, help="this one alone, in this process")
    parser.add_argument("--hostile", choices=HOSTILE)
    args = parser.parse_args()
    if args.hostile:
        compile_hostile(args.library, args.hostile)
    elif args.library:
        print(json.dumps(measure(args.library, args.suite)))
    else:
        found: dict[str, Any] = {}
        for name in LIBRARIES:
            command = [sys.executable, __file__, "--library", name]
            command += ["--suite", str(args.suite)] if args.suite else []
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found[name] = json.loads(said.splitlines()[-1])
            found[name]["hostile"] = {label: hostile(name, label) for label in HOSTILE}
        print(json.dumps(found, indent=2, ensure_ascii=False))
        if args.json:
            args.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
