"""`ridgeline completion`: a script that completes verbs, flags and their values in a shell."""

from __future__ import annotations

import argparse

from ridgeline.cli.parsing import Verbs, add_verb
from ridgeline.models.files.known_models import KNOWN_MODELS

DESCRIPTION = """\
Print a script that completes verbs, flags, their values and short names of models. Load it in the running
shell, or save it where the shell finds it at its start. Print it again after an update."""

EXAMPLES = """\
  source <(ridgeline completion bash)
  ridgeline completion bash > ~/.local/share/bash-completion/completions/ridgeline
  ridgeline completion zsh > ~/.zfunc/_ridgeline
  ridgeline completion fish > ~/.config/fish/completions/ridgeline.fish
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "completion", "complete commands in your shell", DESCRIPTION, EXAMPLES)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to complete in")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ridgeline.cli.flags.command_tree import commands
    from ridgeline.cli.flags.shells import SHELLS
    from ridgeline.cli.main import build_parser

    tree = list(commands(build_parser()))
    print(SHELLS[args.shell](tree, [known.name for known in KNOWN_MODELS]), end="")
    return 0
