"""Completion scripts for bash, zsh and fish from the command tree. They call nothing: each has all words."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.cli.flags.command_tree import Command, Flag

BASH = """\
# bash completion of ridgeline. For this shell: source <(ridgeline completion bash)
# For every shell: ridgeline completion bash > ~/.local/share/bash-completion/completions/ridgeline
_ridgeline() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    local where=ridgeline words="" flags="" values="" takes_file="" i
    # bash splits --flag=value into three words.
    if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$where ${{COMP_WORDS[i]}}" in
            {paths}) where="$where ${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$where" in
{commands}
    esac
    COMPREPLY=()
    if [[ $values == "<file>" ]]; then
        compopt -o default 2>/dev/null
    elif [[ $values == "<other>" ]]; then
        return
    elif [[ -n $values ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$cur")
    else
        [[ -n $takes_file ]] && compopt -o default 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
        if [[ -n $takes_file && ${{#COMPREPLY[@]}} -gt 0 ]]; then
            mapfile -t -O ${{#COMPREPLY[@]}} COMPREPLY < <(compgen -f -- "$cur")
        fi
    fi
}}
complete -F _ridgeline ridgeline
"""

ZSH = """\
#compdef ridgeline
# zsh completion of ridgeline. For this shell: source <(ridgeline completion zsh)
# For every shell: ridgeline completion zsh > _ridgeline in a directory of $fpath
_ridgeline() {{
    local where=ridgeline prev="${{words[CURRENT-1]}}" takes_file="" kind="" i
    local -a verbs flags values
    for ((i = 2; i < CURRENT; i++)); do
        case "$where ${{words[i]}}" in
            ({paths}) where="$where ${{words[i]}}" ;;
        esac
    done
    case "$where" in
{commands}
    esac
    if [[ $kind == file ]]; then
        _files
    elif [[ $kind == other ]]; then
        return 1
    elif [[ $kind == choice ]]; then
        compadd -- $values
    elif [[ ${{words[CURRENT]}} == -* ]]; then
        _describe -o flag flags
    else
        _describe word verbs
        [[ -n $takes_file ]] && _files
    fi
}}
if [[ ${{funcstack[1]}} == _ridgeline ]]; then _ridgeline "$@"; else compdef _ridgeline ridgeline; fi
"""

FISH = """\
# fish completion of ridgeline. For this shell: ridgeline completion fish | source
# For every shell: ridgeline completion fish > ~/.config/fish/completions/ridgeline.fish
function __ridgeline_at
    set -l where ridgeline
    set -l tokens (commandline -opc)
    for token in $tokens[2..-1]
        switch "$where $token"
            case {paths}
                set where "$where $token"
        end
    end
    test "$where" = "$argv"
end
complete -c ridgeline -f
{commands}
"""


def bash(tree: Sequence[Command], models: Sequence[str]) -> str:
    blocks = []
    for command in tree:
        strings = [string for flag in command.flags for string in flag.strings]
        words = [name for name, _ in command.verbs] + (list(models) if command.takes_model else [])
        blocks += [
            f'        "{command.name}")',
            f'            words="{" ".join(words)}" takes_file="{"yes" * command.takes_file}"',
            f'            flags="{" ".join(strings)}"',
            *_bash_values(command.flags),
            "            ;;",
        ]
    return BASH.format(paths=_paths(tree, '"', "|"), commands="\n".join(blocks))


def zsh(tree: Sequence[Command], models: Sequence[str]) -> str:
    blocks = []
    for command in tree:
        verbs = [*command.verbs, *((name, "model") for name in models if command.takes_model)]
        flags = [(string, flag.help) for flag in command.flags for string in flag.strings]
        blocks += [
            f'        ("{command.name}")',
            f'            takes_file="{"yes" * command.takes_file}"',
            f"            verbs=({' '.join(_described(word, text) for word, text in verbs)})",
            f"            flags=({' '.join(_described(word, text) for word, text in flags)})",
            *_zsh_values(command.flags),
            "            ;;",
        ]
    return ZSH.format(paths=_paths(tree, '"', "|"), commands="\n".join(blocks))


def fish(tree: Sequence[Command], models: Sequence[str]) -> str:
    lines = []
    for command in tree:
        start = f"complete -c ridgeline -n {_quoted('__ridgeline_at ' + command.name)}"
        if command.takes_file:
            lines.append(f"{start} -F")
        lines += [f"{start} -a {_quoted(name)} -d {_quoted(text)}" for name, text in command.verbs]
        if command.takes_model:
            lines.append(f"{start} -a {_quoted(' '.join(models))} -d model")
        lines += [f"{start} {_fish_flag(flag)} -d {_quoted(flag.help)}" for flag in command.flags]
    return FISH.format(paths=_paths(tree, "'", " "), commands="\n".join(lines))


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


def _paths(tree: Sequence[Command], quote: str, between: str) -> str:
    return between.join(f"{quote}{command.name}{quote}" for command in tree[1:])


def _bash_values(flags: Sequence[Flag]) -> list[str]:
    lines = [
        f'                {"|".join(strings)}) values="{values}" ;;'
        for values, strings in _by_value(flags).items()
    ]
    return ['            case "$prev" in', *lines, "            esac"] if lines else []


def _zsh_values(flags: Sequence[Flag]) -> list[str]:
    lines = []
    for values, strings in _by_value(flags).items():
        kind = {"<file>": "kind=file", "<other>": "kind=other"}.get(values, f"kind=choice values=({values})")
        lines.append(f"                ({'|'.join(strings)}) {kind} ;;")
    return ['            case "$prev" in', *lines, "            esac"] if lines else []


def _by_value(flags: Sequence[Flag]) -> dict[str, list[str]]:
    """The flags that a value follows, by what it may be."""
    found: dict[str, list[str]] = {}
    for flag in flags:
        if flag.value != "none":
            values = " ".join(flag.choices) if flag.value == "choice" else f"<{flag.value}>"
            found.setdefault(values, []).extend(flag.strings)
    return found


def _fish_flag(flag: Flag) -> str:
    names = " ".join(
        f"-l {string[2:]}" if string.startswith("--") else f"-s {string[1:]}" for string in flag.strings
    )
    if flag.value == "choice":
        return f"{names} -x -a {_quoted(' '.join(flag.choices))}"
    return names + {"none": "", "file": " -r -F", "other": " -x"}[flag.value]


def _described(word: str, text: str) -> str:
    """An entry of zsh's _describe: a colon ends the word, unless it is escaped."""
    return _quoted(word.replace(":", "\\:") + (f":{text}" if text else ""))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "’") + "'"
