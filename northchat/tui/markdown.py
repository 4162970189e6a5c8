"""Streaming Markdown: text in any pieces to rows; a finished block is parsed once and never touched again.

A row is a line before wrapping. Line breaks inside paragraphs are kept, as a chat reader expects of them.
"""

import copy
import re
from typing import Literal, NamedTuple, Protocol

from northchat.sanitize import clean
from northchat.tui.highlight import Highlighter
from northchat.tui.inline import Look, Span, inline, inline_cells, split_cells, split_lines

MAX_PARAGRAPH = 40
"""Lines; a longer paragraph is cut, so that an endless one isn't parsed again and again."""
MAX_NESTING = 12
"""Quotes and list levels; deeper markers are text."""


class Row(NamedTuple):
    """One line before wrapping: `first` stands before its first screen line, `rest` before each that follows."""

    kind: Literal["text", "code", "label", "rule"]
    spans: tuple[Span, ...] = ()
    first: tuple[Span, ...] = ()
    rest: tuple[Span, ...] = ()


class TableRow(NamedTuple):
    """A whole table, since each of its lines depends on the widest cell of every column."""

    header: tuple[tuple[Span, ...], ...]
    aligns: tuple[Literal["left", "right", "center"], ...]
    body: tuple[tuple[tuple[Span, ...], ...], ...]
    first: tuple[Span, ...] = ()
    rest: tuple[Span, ...] = ()


AnyRow = Row | TableRow
BLANK = Row("text")

_MARKER = Look("primary")
_QUOTE = Span("▎ ", Look("border"))
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*(.*)$")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_RULE = re.compile(r" {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_ITEM = re.compile(r"( {0,3})([-*+]|\d{1,9}[.)])( {1,4}(?! )| *$|(?= {5}))")
_QUOTE_MARK = re.compile(r" {0,3}> ?")
_DELIMITERS = re.compile(r" {0,3}\|?(?:[ \t]*:?-+:?[ \t]*\|)*[ \t]*:?-+:?[ \t]*\|?[ \t]*$")
_TASK = re.compile(r"\[([ xX])\] ")
_UNDECIDED = re.compile(r"[-=*+#>|`~: ]*(?:\d{1,9}[.)] *)?$")
"""The start of a line that may yet become a marker of something."""
_BULLETS = "•◦▪"


class Markdown:
    """Takes text as it comes. `rows` only ever grows; `tail()` is what the unfinished end looks like now."""

    def __init__(self) -> None:
        self._blocks = _Blocks()
        self._pending = ""

    @property
    def rows(self) -> list[AnyRow]:
        return self._blocks.rows

    def write(self, text: str) -> None:
        self._pending += text
        if "\n" not in text:
            return
        *lines, self._pending = self._pending.split("\n")
        for line in lines:
            self._blocks.line(_clean(line))

    def tail(self) -> list[AnyRow]:
        fork = self._blocks.fork()
        if self._pending:
            fork.line(_clean(self._pending), partial=True)
        fork.close()
        return fork.rows

    def close(self) -> None:
        """The text has ended: everything becomes rows."""
        if self._pending:
            self._blocks.line(_clean(self._pending))
            self._pending = ""
        self._blocks.close()


class _Quote:
    def match(self, line: str) -> str | None:
        found = _QUOTE_MARK.match(line)
        return line[found.end() :] if found else None

    def prefix(self, first: bool) -> Span:
        return _QUOTE


class _Item:
    def __init__(self, indent: int, marker: str) -> None:
        self.indent = indent
        self.marker = marker

    def match(self, line: str) -> str | None:
        if not line.strip():
            return ""
        return line[self.indent :] if line[: self.indent].isspace() and len(line) > self.indent else None

    def prefix(self, first: bool) -> Span:
        return Span(f"{self.marker} ", _MARKER) if first else Span(" " * (len(self.marker) + 1))


class _Leaf(Protocol):
    """A block that holds text and isn't finished."""

    def fork(self) -> "_Leaf": ...


class _Paragraph:
    def __init__(self, line: str) -> None:
        self.lines = [line]

    def fork(self) -> "_Paragraph":
        other = _Paragraph("")
        other.lines = list(self.lines)
        return other


class _Fence:
    def __init__(self, mark: str, indent: int, info: str) -> None:
        self.mark, self.indent = mark, indent
        """Columns to take off each line: those of the fence itself and of the list items around it."""
        self.language = info.split()[0] if info.strip() else ""
        self.highlighter = Highlighter(self.language.lower().strip("{}."))

    def fork(self) -> "_Fence":
        other = copy.copy(self)
        other.highlighter = self.highlighter.fork()
        return other

    def dedent(self, line: str) -> str:
        """Models seldom indent code inside list items rightly: the leftmost line so far sets the margin."""
        inside = len(line) - len(line.lstrip(" "))
        if line.strip() and not self.ended_by(line.strip()):
            self.indent = min(self.indent, inside)
        return line[min(inside, self.indent) :]

    def ended_by(self, line: str) -> bool:
        found = _FENCE.match(line)
        return bool(found and not found[2] and found[1][0] == self.mark[0] and len(found[1]) >= len(self.mark))


class _Table:
    def __init__(self, header: str, delimiters: str) -> None:
        self.header = inline_cells(header)
        marks = [mark.strip() for mark in split_cells(delimiters)]
        self.aligns: tuple[Literal["left", "right", "center"], ...] = tuple(
            "center" if mark[0] == mark[-1] == ":" and len(mark) > 1 else "right" if mark[-1] == ":" else "left"
            for mark in marks
        )
        self.body: list[tuple[tuple[Span, ...], ...]] = []

    def fork(self) -> "_Table":
        other = copy.copy(self)
        other.body = list(self.body)
        return other

    def add(self, line: str) -> None:
        cells = inline_cells(line)[: len(self.aligns)]
        self.body.append(cells + ((),) * (len(self.aligns) - len(cells)))


class _Blocks:
    """The state of a CommonMark document after some whole lines: open containers and the open leaf in them."""

    def __init__(self) -> None:
        self.rows: list[AnyRow] = []
        self._containers: list[_Quote | _Item] = []
        self._fresh: set[int] = set()
        """Levels of list items whose marker isn't shown yet."""
        self._leaf: _Paragraph | _Fence | _Table | None = None
        self._any = False
        self._gap: list[_Quote | _Item] | None = None
        """Where a blank line is due before the next row: the containers that were open then."""

    def fork(self) -> "_Blocks":
        other = copy.copy(self)
        other.rows = []
        other._containers = list(self._containers)
        other._fresh = set(self._fresh)
        other._leaf = self._leaf.fork() if self._leaf else None
        return other

    def line(self, line: str, partial: bool = False) -> None:
        """`partial`: more of this line may come, so it doesn't decide yet what only a whole line can."""
        line = line.expandtabs(4)
        if partial and not isinstance(self._leaf, _Fence) and _UNDECIDED.match(line):
            return
        level, rest = self._enter(line)
        if isinstance(self._leaf, _Fence):
            if level == len(self._containers):
                self._code(self._leaf, rest, partial)
                return
            self._close_leaf()
        if level < len(self._containers):
            if isinstance(self._leaf, _Paragraph) and not self._starts_block(rest):
                self._paragraph(rest, partial)
                return
            self._close_to(level)
        rest = self._open_containers(rest)
        self._leaf_line(rest, partial)

    def close(self) -> None:
        self._close_to(0)

    def _enter(self, line: str) -> tuple[int, str]:
        """How many of the open containers the line continues, and what stands inside them."""
        for level, container in enumerate(self._containers):
            if isinstance(self._leaf, _Fence) and isinstance(container, _Item):
                continue
            inside = container.match(line)
            if inside is None:
                return level, line
            line = inside
        return len(self._containers), line

    def _open_containers(self, line: str) -> str:
        while len(self._containers) < MAX_NESTING:
            if found := _QUOTE_MARK.match(line):
                self._close_leaf()
                self._containers.append(_Quote())
                line = line[found.end() :]
                continue
            found = None if _RULE.match(line) else _ITEM.match(line)
            if not found or (isinstance(self._leaf, _Paragraph) and not self._interrupts(found, line)):
                return line
            self._close_leaf()
            padding = found[3] or " "
            depth = sum(isinstance(container, _Item) for container in self._containers)
            marker = found[2] if found[2][0].isdigit() else _BULLETS[depth % len(_BULLETS)]
            self._fresh.add(len(self._containers))
            width = len(found[1]) + len(found[2]) + (len(padding) if line[found.end() :] else 1)
            self._containers.append(_Item(width, marker))
            line = line[found.end() :].removeprefix("" if found[3] else " ")
        return line

    def _interrupts(self, found: re.Match[str], line: str) -> bool:
        return bool(line[found.end() :].strip()) and found[2] in ("-", "*", "+", "1.", "1)")

    def _starts_block(self, line: str) -> bool:
        if not line.strip() or any(pattern.match(line) for pattern in (_FENCE, _HEADING, _RULE, _QUOTE_MARK)):
            return True
        found = _ITEM.match(line)
        # Beside a list, any number goes on with it: only a paragraph outside of lists is protected from "2018. A year".
        return bool(found and line[found.end() :].strip())

    def _leaf_line(self, line: str, partial: bool) -> None:
        if not line.strip():
            self._close_leaf()
            self._space()
            return
        if isinstance(self._leaf, _Table):
            if not self._starts_block(line):
                self._leaf.add(line)
                return
            self._close_leaf()
        if isinstance(self._leaf, _Paragraph) and self._underline(self._leaf, line):
            return
        indent = len(line) - len(line.lstrip(" "))
        if indent >= 4 and self._leaf is None:
            self._emit(Row("code", (Span(line[4:]),)))
        elif (found := _FENCE.match(line)) and not (found[1][0] == "`" and "`" in found[2]):
            self._open_fence(found[1], indent, found[2])
        elif found := _HEADING.match(line):
            self._close_leaf()
            self._heading(found[2] or "", len(found[1]))
        elif _RULE.match(line):
            self._close_leaf()
            self._emit(Row("rule"))
        else:
            self._paragraph(line, partial)

    def _underline(self, paragraph: _Paragraph, line: str) -> bool:
        """Whether the line makes a heading or a table of the paragraph above it."""
        if found := _SETEXT.match(line):
            self._leaf = None
            self._heading("\n".join(paragraph.lines), 1 if found[1][0] == "=" else 2)
            return True
        header = paragraph.lines[-1]
        if "|" not in line + header or not _DELIMITERS.match(line):
            return False
        if len(split_cells(header)) != len(split_cells(line)):
            return False
        paragraph.lines.pop()
        self._leaf = paragraph if paragraph.lines else None
        self._close_leaf()
        self._space()
        self._leaf = _Table(header, line)
        return True

    def _paragraph(self, line: str, partial: bool) -> None:
        # A hard break's own marks, two blanks or a backslash, say nothing where every break is kept.
        line = line.strip()
        if isinstance(self._leaf, _Paragraph) and len(self._leaf.lines) < MAX_PARAGRAPH:
            self._leaf.lines.append(line)
            return
        self._close_leaf()
        self._leaf = _Paragraph(line)

    def _open_fence(self, mark: str, indent: int, info: str) -> None:
        self._close_leaf()
        self._space()
        for container in self._containers:
            indent = indent + container.indent if isinstance(container, _Item) else 0
        self._leaf = _Fence(mark, indent, info)
        if self._leaf.language:
            self._emit(Row("label", (Span(self._leaf.language, Look("muted")),)))

    def _code(self, fence: _Fence, line: str, partial: bool) -> None:
        line = fence.dedent(line)
        if fence.ended_by(line.strip()):
            self._leaf = None
            self._gap = list(self._containers)
        elif not (partial and line.strip() and set(line.strip()) == {fence.mark[0]}):
            pairs = fence.highlighter.line(line)
            self._emit(Row("code", tuple(Span(text, Look(role)) for text, role in pairs)))

    def _heading(self, text: str, level: int) -> None:
        self._space()
        look = Look("primary", bold=True, underline=level == 1) if level < 3 else Look("foreground", bold=True)
        for spans in split_lines(inline(text, look)):
            self._emit(Row("text", spans))
        self._space()

    def _space(self) -> None:
        if not self._fresh:
            self._gap = list(self._containers)

    def _close_to(self, level: int) -> None:
        self._close_leaf()
        for fresh in [at for at in sorted(self._fresh) if at >= level]:
            # An item that stayed empty still shows its marker.
            if fresh in self._fresh:
                self._emit(BLANK)
        del self._containers[level:]

    def _close_leaf(self) -> None:
        leaf, self._leaf = self._leaf, None
        match leaf:
            case _Paragraph():
                text = "\n".join(leaf.lines)
                if self._fresh and (found := _TASK.match(text)):
                    text = ("☐ " if found[1] == " " else "☑ ") + text[found.end() :]
                for spans in split_lines(inline(text)):
                    self._emit(Row("text", spans))
            case _Table():
                first, rest = self._prefixes()
                self._emit_raw(TableRow(leaf.header, leaf.aligns, tuple(leaf.body), first, rest))
                self._gap = list(self._containers)
            case _Fence():
                self._gap = list(self._containers)

    def _emit(self, row: Row) -> None:
        first, rest = self._prefixes()
        self._emit_raw(row._replace(first=first, rest=rest))

    def _emit_raw(self, row: AnyRow) -> None:
        if self._gap is not None and self._any:
            open_still = zip(self._gap, self._containers, strict=False)
            quotes = tuple(_QUOTE for then, now in open_still if then is now and isinstance(now, _Quote))
            self.rows.append(BLANK._replace(first=quotes))
        self._gap = None
        self._any = True
        self.rows.append(row)

    def _prefixes(self) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        first = tuple(container.prefix(at in self._fresh) for at, container in enumerate(self._containers))
        self._fresh.clear()
        return first, tuple(container.prefix(False) for container in self._containers)


def _clean(line: str) -> str:
    return clean(line.removesuffix("\r"))
