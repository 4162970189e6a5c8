"""Completion scripts, made from the options that the command line really has."""

import argparse
import shlex
from collections.abc import Iterable

SHELLS = ("bash", "zsh", "fish")
SUBCOMMANDS = {
    "models": ("list", "pull", "path", "rm"),
    "engine": ("status", "stop"),
    "doctor": (),
    "logs": (),
    "config": ("show", "path"),
    "completion": SHELLS,
}


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    options = [action for action in parser._actions if action.option_strings]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](options)


def _bash(options: list[argparse.Action]) -> str:
    lists = [("|".join(option.option_strings), option.choices) for option in options if option.choices]
    lists += [(name, verbs) for name, verbs in SUBCOMMANDS.items() if verbs]
    cases = "".join(
        f'    {word}) COMPREPLY=($(compgen -W "{_words(values)}" -- "$cur")); return;;\n' for word, values in lists
    )
    flags = " ".join(flag for o in options for flag in o.option_strings)
    return f"""\
_northchat() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
  COMPREPLY=()
  case $prev in
{cases}    --model) COMPREPLY=($(compgen -f -- "$cur")); return;;
    -C) COMPREPLY=($(compgen -d -- "$cur")); return;;
  esac
  if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W "{flags}" -- "$cur"))
  elif (( COMP_CWORD == 1 )); then COMPREPLY=($(compgen -W "{_words(SUBCOMMANDS)}" -- "$cur")); fi
}}
complete -F _northchat northchat
"""


def _words(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


def _zsh(options: list[argparse.Action]) -> str:
    lines = []
    for option in options:
        text = (option.help or "").replace("'", "").replace("[", "(").replace("]", ")").replace(":", " -")
        value = ""
        if option.nargs != 0:
            value = ":value:" + (f"({_words(option.choices)})" if option.choices else "_files")
        lines += [f"    '{flag}[{text}]{value}'" for flag in option.option_strings]
    cases = "".join(
        f"      {name}) _values {name} {_words(verbs)}; return;;\n" for name, verbs in SUBCOMMANDS.items() if verbs
    )
    joined = " \\\n".join(lines)
    return f"""\
_northchat() {{
  if (( CURRENT == 3 )); then
    case $words[2] in
{cases}    esac
  fi
  _arguments \\
{joined} \\
    '1:subcommand:({_words(SUBCOMMANDS)})'
}}
compdef _northchat northchat
"""


def _fish(options: list[argparse.Action]) -> str:
    lines = []
    for option in options:
        line = "complete -c northchat"
        for flag in option.option_strings:
            line += f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}"
        if option.choices:
            line += f" -x -a {shlex.quote(_words(option.choices))}"
        elif option.nargs != 0:
            line += " -r"
        lines.append(f"{line} -d {shlex.quote(option.help or '')}")
    lines.append(f"complete -c northchat -n __fish_use_subcommand -f -a {shlex.quote(_words(SUBCOMMANDS))}")
    for name, verbs in SUBCOMMANDS.items():
        if verbs:
            lines.append(
                f"complete -c northchat -n '__fish_seen_subcommand_from {name}' -f -a {shlex.quote(_words(verbs))}"
            )
    return "\n".join(lines) + "\n"
