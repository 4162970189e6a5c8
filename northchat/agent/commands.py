"""Slash commands that every front end understands; each front end carries them out in its own way."""

import difflib
import re
from typing import NamedTuple


class Command(NamedTuple):
    name: str
    argument: str
    summary: str


COMMANDS = (
    Command("help", "", "show commands and keys"),
    Command("model", "[NAME|NUMBER|URL]", "list models, or switch to one"),
    Command("theme", "[NAME]", "list themes, or switch to one"),
    Command("clear", "", "forget the conversation and start anew"),
    Command("quit", "", "leave"),
)
_BY_NAME = {command.name: command for command in COMMANDS} | {"exit": COMMANDS[-1]}
# A path such as /usr/bin/env at the start of a question is no command.
_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)


class UnknownCommand(Exception):
    """One line that names the remedy."""


def parse(text: str) -> tuple[Command, str] | None:
    """The command and its argument, or None when the text is for the model.

    Raises UnknownCommand when it looks like a command and is none.
    """
    match = _COMMAND.fullmatch(text.strip())
    if match is None:
        return None
    name = "help" if match[1] == "?" else match[1]
    command = _BY_NAME.get(name)
    if command is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        raise UnknownCommand(f"No command /{name}; " + (f"did you mean /{near[0]}?" if near else "/help lists them"))
    return command, (match[2] or "").strip()
