"""Tool calls out of a block of JSON that a model writes, as it writes it.

    [{"tool_call_id": "0", "tool_name": "read", "parameters": {"path": "a.py"}}, ...]

Taken too: one object without brackets, keys in any order, `name` and `arguments` for the keys, missing parameters,
parameters as a string of JSON, backslashes that begin no JSON escape (a regular expression's) and raw control
characters in strings, a block that is cut off between values. Arguments are passed on as valid JSON wherever the block
allows, piece by piece once the tool's name is known.
"""

import json
import uuid
from typing import Any

from northchat.messages import Event, Text, ToolCallArguments, ToolCallEnd, ToolCallStart

_NAME = ("tool_name", "name")
_PARAMETERS = ("parameters", "arguments")
_CLOSERS = {"{": "}", "[": "]"}
_ESCAPES = set('"\\/bfnrt')
_HEX = set("0123456789abcdefABCDEF")


class ActionScanner:
    """Feed it the text of all blocks of one answer in turn, `end` each."""

    def __init__(self, parallel: bool) -> None:
        self._parallel = parallel
        self.calls = 0
        """Calls started so far."""
        self.done = False
        """Only one call was wanted, and it is there."""
        self._stray = ""
        self._reset()

    def _reset(self) -> None:
        """Before an object."""
        self._open: list[str] = []
        """Brackets open, the call object's own included."""
        self.in_string = False
        self._escape = ""
        self._literal = ""
        self._key: str | None = None
        self._value: list[str] = []
        """Text of the key or value under way in the call object."""
        self._colon = False
        self._name: str | None = None
        self._raw: list[str] = []
        """The object's text while its tool is unknown."""
        self._early: list[str] = []
        """Arguments that came before the name."""
        self._argued = False
        self._settled = False
        """The parameters are complete: a second value for them is ignored."""

    def feed(self, text: str, events: list[Event]) -> None:
        text, self._literal = self._literal + text, ""
        for character in text:
            if self.done:
                return
            if not self._open:
                self._outside(character)
            else:
                if self._name is None:
                    self._raw.append(character)
                if self.in_string:
                    self._in_string(character, events)
                else:
                    self._between(character, events)

    def literal(self, marker: str) -> None:
        """A marker inside a string: it is text there if the string goes on, else the string was never closed."""
        self._literal += marker

    def end(self, events: list[Event]) -> None:
        """The block is over, closed or cut off."""
        if self._open:
            # Within a string nobody knows what is missing; between values only brackets are.
            if not self.in_string:
                brackets = "".join(_CLOSERS[bracket] for bracket in reversed(self._open[1:]))
                self._finish_value(events)
                if brackets and self._argued:
                    self._argue(brackets, events)
            elif self._key in _PARAMETERS and not self._argued:
                self._argue("".join(self._value), events)
            if self._name is not None:
                self._finish_call(events)
        if self._stray.strip():
            events.append(Text(self._stray.strip()))
        self._stray = ""
        self._reset()

    def _outside(self, character: str) -> None:
        if character == "{":
            self._reset()
            self._open.append(character)
            self._raw.append(character)
        elif character not in "[],":
            self._stray += character

    def _between(self, character: str, events: list[Event]) -> None:
        inner = len(self._open) > 1
        match character:
            case '"':
                self.in_string = True
                self._take(character, events)
            case "{" | "[":
                self._open.append(character)
                self._take(character, events)
            case "}" | "]" if inner:
                self._take(_CLOSERS[self._open[-1]], events)
                self._open.pop()
            case "}" | "]":
                self._finish_value(events)
                self._finish_object(events)
            case ":" if not inner:
                self._key, self._colon = _decoded("".join(self._value)), True
                self._value.clear()
            case "," if not inner:
                self._finish_value(events)
            case _ if inner or not character.isspace():
                self._take(character, events)

    def _in_string(self, character: str, events: list[Event]) -> None:
        if self._escape:
            self._in_escape(character, events)
        elif character == "\\":
            self._escape = character
        elif character == '"':
            self.in_string = False
            self._take(character, events)
            if len(self._open) == 1 and self._colon and self._key in _NAME:
                self._finish_value(events)
        elif character < " ":
            self._take(json.dumps(character)[1:-1], events)
        else:
            self._take(character, events)

    def _in_escape(self, character: str, events: list[Event]) -> None:
        escape = self._escape + character
        if len(escape) == 2 and character in _ESCAPES:
            self._escape = ""
            self._take(escape, events)
        elif escape[1] == "u" and (len(escape) == 2 or character in _HEX):
            self._escape = "" if len(escape) == 6 else escape
            if len(escape) == 6:
                self._take(escape, events)
        else:
            # Not an escape of JSON's: the backslash was meant as one.
            self._take("\\\\" + self._escape[1:], events)
            self._escape = ""
            self._in_string(character, events)

    def _take(self, text: str, events: list[Event]) -> None:
        """A piece of the value under way: passed on if it belongs to arguments, kept if it is a key or a scalar."""
        if len(self._open) == 1:
            self._value.append(text)
        elif self._colon and self._key in _PARAMETERS and not self._settled:
            self._argue(text, events)

    def _finish_value(self, events: list[Event]) -> None:
        text = "".join(self._value)
        self._value.clear()
        if self._colon and self._key in _NAME and self._name is None:
            self._start(_decoded(text), events)
        elif self._colon and self._key in _PARAMETERS:
            if not self._argued:
                self._argue(_arguments(text), events)
            self._settled = True
        self._key, self._colon = None, False

    def _start(self, name: str, events: list[Event]) -> None:
        if not name:
            return
        self._name = name
        self._raw.clear()
        events.append(ToolCallStart(self.calls, f"call_{uuid.uuid4().hex[:24]}", name))
        self.calls += 1
        early = "".join(self._early)
        if early:
            events.append(ToolCallArguments(self.calls - 1, early))

    def _argue(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        self._argued = True
        if self._name is None:
            self._early.append(text)
        elif events and isinstance(last := events[-1], ToolCallArguments):
            last.text += text
        else:
            events.append(ToolCallArguments(self.calls - 1, text))

    def _finish_object(self, events: list[Event]) -> None:
        if self._name is None:
            self._stray += "".join(self._raw)
        else:
            self._finish_call(events)
        self._reset()

    def _finish_call(self, events: list[Event]) -> None:
        if not self._argued:
            self._argue("{}", events)
        events.append(ToolCallEnd(self.calls - 1))
        self.done = not self._parallel


def _decoded(text: str) -> str:
    """The string that a JSON text is; other values as they are written."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _arguments(text: str) -> str:
    """Arguments that are no object: nothing, or an object that was encoded twice."""
    inner = _decoded(text).strip()
    if inner in ("", "null"):
        return "{}"
    try:
        return inner if isinstance(json.loads(inner), dict) else text
    except ValueError:
        return text
