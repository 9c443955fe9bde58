"""`ridgeline models export`: writes a model's files with a manifest into a folder, as a store for fleets."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from ridgeline.cli.parsing import MODEL_HELP, add_verb, path_argument
from ridgeline.cli.progress import fetch
from ridgeline.models.errors import ModelError

DESCRIPTION = """\
Write a model's files into a folder, with manifest.json: the name, size and sha256 of each. The folder, or a
bucket that it is copied to, is a source of weights for fleets ([models.weights] sources) and for `ridgeline
serve --weight-sources`. If this machine has packed weights or compiled kernels for the model, they are added
as an archive for machines with the same key. Archives of other machines in the folder are kept."""

EXAMPLES = """\
  ridgeline models export smollm2-135m ./store
  ridgeline models export Qwen/Qwen3-8B /mnt/bucket/qwen3-8b --no-caches
"""


def add_parser(actions: Any) -> None:
    parser = add_verb(actions, "export", "write a model as a store for fleets", DESCRIPTION, EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("folder", type=path_argument, metavar="DIR", help="folder to write to")
    parser.add_argument("--no-caches", action="store_true", help="no packed weights, no compiled kernels")
    parser.add_argument(
        "--weights", default="auto", metavar="TEXT", help="`--weights` of the packed weights (default: auto)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import msgspec

    from ridgeline.models.sources.file_hashes import file_sha256
    from ridgeline.models.sources.manifest import MANIFEST_FILE
    from ridgeline.models.sources.model_files import manifest_of

    path = fetch(args.model, sys.stderr).path
    manifest, paths = manifest_of(args.model, path)
    folder: Path = args.folder
    for held in manifest.files:
        target = folder / held.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (target.is_file() and file_sha256(target) == held.sha256):
            shutil.copyfile(paths[held.sha256], target)
            if file_sha256(target) != held.sha256:
                raise ModelError(
                    f"{target}: the copy has another sha256 than {paths[held.sha256]}; try again"
                )
        print(f"{held.name}  {held.bytes:,} bytes  sha256 {held.sha256}")
    caches = () if args.no_caches else _caches(args, path, folder)
    content = msgspec.json.format(
        msgspec.json.encode(msgspec.structs.replace(manifest, caches=caches)), indent=1
    )
    temporary = folder / f".{MANIFEST_FILE}.{os.getpid()}"
    temporary.write_bytes(content + b"\n")
    temporary.replace(folder / MANIFEST_FILE)  # last: it is there when everything else is
    print(folder / MANIFEST_FILE)
    return 0


def _caches(args: argparse.Namespace, path: Path, folder: Path) -> tuple[Any, ...]:
    """Archives of other machines that are in the folder, and this machine's."""
    from ridgeline.engine.caches.shipping import held_cache, offered
    from ridgeline.engine.config import EngineConfig
    from ridgeline.models.sources.holders import FolderStore, HolderFailed

    try:
        kept = [one for one in FolderStore(folder).manifest().caches if (folder / one.name).is_file()]
    except HolderFailed:
        kept = []
    archive = offered(path, EngineConfig(model=args.model, weights=args.weights))
    if archive is None:
        print("no packed weights or kernels of this machine: serve the model once to make them")
        return tuple(kept)
    own = held_cache(archive)
    temporary = folder / f".{own.name}.{os.getpid()}"
    archive.write(temporary)
    temporary.replace(folder / own.name)
    print(
        f"{own.name}  {own.bytes:,} bytes  {own.kind} for "
        + ", ".join(f"{k} {v}" for k, v in own.key.items())
    )
    return (*(one for one in kept if (one.kind, one.key) != (own.kind, own.key)), own)
