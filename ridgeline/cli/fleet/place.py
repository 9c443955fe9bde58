"""`ridgeline fleet place`: places replicas over the capacity pools of a file. Starts nothing."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from ridgeline.cli.parsing import Verbs, add_verb, path_argument
from ridgeline.options import OptionError, nearest

DESCRIPTION = """\
Place replicas over the capacity pools of a file, by price, latency to users, residency and redundancy, and
print why each pool was chosen or not. A dry run: nothing is bought or started. With --current, replicas that
can stay where they are stay; with --failed, a pool is treated as down."""

EXAMPLES = """\
  ridgeline fleet place pools.toml
  ridgeline fleet place pools.toml --json > placement.json
  ridgeline fleet place pools.toml --current placement.json --failed aws-eu
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "place", "place replicas over capacity pools (dry run)", DESCRIPTION, EXAMPLES)
    parser.add_argument("file", type=path_argument, metavar="FILE", help="pools.toml")
    parser.add_argument(
        "--failed",
        action="append",
        default=[],
        metavar="POOL",
        help="treat this pool as down; repeatable",
    )
    parser.add_argument(
        "--current",
        type=path_argument,
        metavar="FILE",
        help="file with the current placement, as --json prints it",
    )
    parser.add_argument("--json", action="store_true", help="print the placement as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ridgeline.fleet.placement import read_pools, repack
    from ridgeline.fleet.placement.why import explain

    file = read_pools(args.file)
    names = [pool.name for pool in file.pools]
    for name in args.failed:
        if name not in names:
            raise OptionError(f"--failed {name}: no such pool{nearest(name, names)}")
    file = replace(
        file,
        pools=tuple(replace(pool, failed=pool.failed or pool.name in args.failed) for pool in file.pools),
    )
    current = {} if args.current is None else _read_current(args.current)
    found = repack(file, current)
    if args.json:
        print(json.dumps({"replicas": found.replicas, "price": found.price, "moved": found.moved}, indent=1))
    else:
        print("\n".join(explain(file, found, current)))
        moved = f"; {found.moved} replicas leave a working pool" if found.moved else ""
        print(f"${found.price:,.2f} per hour{moved}")
    return 1 if found.unplaced else 0


def _read_current(path: Path) -> dict[str, dict[str, int]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["replicas"]
        return {
            str(model): {str(pool): int(count) for pool, count in pools.items()}
            for model, pools in found.items()
        }
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{path}: not a placement in the form of `fleet place --json`") from error
