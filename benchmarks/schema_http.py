"""What a server answers under real schemas: valid documents, refusals by name, and no server error.

    ridgeline serve smollm2-135m --port 8000
    python benchmarks/schema_http.py FOLDER [--url http://127.0.0.1:8000] [--max-tokens 256] [--json out.json]

FOLDER holds JSON schemas, one a file. Each is sent as the `response_format` of one chat request. A finished
answer is held to the original schema by the package jsonschema. Bars: 0 violations, 0 server errors.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema

REQUESTS_AT_ONCE = 8
READY_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of an answer (default 256)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    files = sorted(arguments.folder.rglob("*.json"))
    await_ready(arguments.url)
    counts: Counter[str] = Counter()
    faults: list[str] = []
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        outcomes = pool.map(
            lambda item: ask(arguments.url, item[1], item[0], arguments.max_tokens), enumerate(files)
        )
        for file, (outcome, detail) in zip(files, outcomes, strict=True):
            counts[outcome] += 1
            if outcome.startswith(("5", "violation")):
                faults.append(f"{file.name}: {outcome}: {detail[:200]}")
    for outcome, count in counts.most_common():
        print(f"{outcome:24}{count:6}")
    print(*faults, sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"outcomes": counts, "faults": faults}, indent=1))
    return bool(faults)


def await_ready(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=READY_S).close()
            return
        except urllib.error.URLError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} is not ready after {READY_S:.0f} s: {error}") from error
        time.sleep(0.2)


def ask(url: str, file: Path, seed: int, max_tokens: int) -> tuple[str, str]:
    schema = json.loads(file.read_text())
    body = {
        "messages": [{"role": "user", "content": "Write an example document."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "document", "schema": schema}},
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "seed": seed,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        return f"{error.code} {code_of(error)}", error.reason
    if choice["finish_reason"] != "stop":
        return f"200 {choice['finish_reason']}", ""
    text = choice["message"]["content"]
    return ("200 valid", "") if is_valid(schema, text) else ("violation", text)


def code_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "without a code"


def is_valid(schema: Any, text: str) -> bool:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return not any(True for _ in validator(schema).iter_errors(json.loads(text)))


if __name__ == "__main__":
    raise SystemExit(main())
