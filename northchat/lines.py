"""An answer as it streams, for output that is never redrawn: prose at once, fenced code coloured line by line."""

import re
from collections.abc import Callable

from northchat.tui.highlight import Highlighter

Put = Callable[[list[tuple[str, str]]], None]
"""Takes (text, syntax role) pairs, in order; the role `foreground` is ordinary text."""

_OPENING = re.compile(r"\s*(`{3,}|~{3,})\s*([^\s`]*)[^`]*")
_PERHAPS_OPENING = re.compile(r"\s*(`{0,2}|~{0,2}|`{3,}[^`]*|~{3,}.*)", re.DOTALL)


class AnswerWriter:
    """feed() what comes, then end() once. The texts put, joined, are the texts fed and a newline if one was missing."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._line = ""
        """Of the current line, what isn't put yet."""
        self._inside = False
        """The current line is prose of which the start is put already."""
        self._fence = ""
        self._highlighter = Highlighter("")

    def feed(self, text: str) -> None:
        for piece in re.split(r"(?<=\n)", text):
            self._line += piece
            if self._line.endswith("\n"):
                self._end_line()
            elif not self._fence and (self._inside or not _PERHAPS_OPENING.fullmatch(self._line)):
                self._plain(self._line)
                self._line, self._inside = "", True

    def end(self) -> None:
        if self._line:
            self._line += "\n"
            self._end_line()
        elif self._inside:
            self._plain("\n")
            self._inside = False

    def _end_line(self) -> None:
        line, self._line = self._line, ""
        if self._fence:
            if self._closes(line):
                self._fence = ""
                self._plain(line)
            else:
                self._put([*self._highlighter.line(line[:-1]), ("\n", "foreground")])
            return
        if not self._inside and (match := _OPENING.fullmatch(line.rstrip())):
            self._fence, self._highlighter = match[1], Highlighter(match[2].lower())
        self._plain(line)
        self._inside = False

    def _closes(self, line: str) -> bool:
        mark = line.strip()
        return len(mark) >= len(self._fence) and set(mark) == {self._fence[0]}

    def _plain(self, text: str) -> None:
        if text:
            self._put([(text, "foreground")])
