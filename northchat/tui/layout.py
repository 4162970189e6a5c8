"""Rows to screen lines: wrapping at a width, in a theme's colours."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.cells import cell_len, split_graphemes
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from northchat.tui.inline import PLAIN, Look, Span
from northchat.tui.markdown import AnyRow, TableRow
from northchat.tui.theme import Theme

MEASURE = 100
"""Cells; longer lines of prose are tiring to read. Code and tables take what there is."""

_WIDE = "\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6"
# Lines of Chinese and Japanese break anywhere but before closing punctuation.
_WORD = re.compile(rf" +|[{_WIDE}][、。，．！？：；」』）】》〉”’…]*|[^ {_WIDE}]+")


class Line(NamedTuple):
    strip: Strip
    text: str
    """What copying gives: the line without quote bars, bullets' indents and padding."""
    start: int
    """Where that text begins in the strip's text, in characters."""
    joint: str = "\n"
    """What copying puts between the line before and this one: nothing or a blank where wrapping broke them."""


class Palette:
    """A theme's roles as Rich styles on one of its backgrounds."""

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self._colours = {role: _colour(value) for role, value in (theme.syntax | theme.ui).items()}
        self._colours |= {"code": self._colours["builtin"], "link": self._colours["primary"]}
        self._styles: dict[tuple[Look, str], Style] = {}

    def style(self, look: Look, ground: str = "background") -> Style:
        found = self._styles.get((look, ground))
        if found is None:
            found = Style(
                color=self._colours.get(look.role, self._colours["foreground"]),
                bgcolor=self._colours[ground],
                bold=look.bold or None,
                italic=look.italic or None,
                strike=look.strike or None,
                underline=look.underline or None,
                link=look.link if look.link.startswith(("https://", "http://", "mailto:")) else None,
            )
            if len(self._styles) > 4_000:
                self._styles.clear()  # links make endlessly many
            self._styles[look, ground] = found
        return found


def lay_out(row: AnyRow, width: int, palette: Palette, ground: str = "background") -> list[Line]:
    """The screen lines of one row, `width` cells at most (a width under 4 counts as 4)."""
    width = max(width, 4)
    if isinstance(row, TableRow):
        return list(_table(row, width, palette, ground))
    taken = _cells(row.first)
    room = max(width - taken, 4)
    if row.kind == "rule":
        rule = [Span("─" * max(1, min(room, MEASURE - taken)), Look("border"))]
        return [_line(row.first, rule, palette, ground)]
    fill = 0
    spans = row.spans
    if row.kind in ("code", "label"):
        # A block of code lies on a ground of its own; where the theme has none, a bar marks it.
        bar = palette.theme.ui["surface"] == palette.theme.ui["background"]
        edge = Span("│ " if bar else "  ", Look("border"))
        row = row._replace(first=(*row.first, edge), rest=(*row.rest, edge))
        room, fill = max(room - 3, 1), width
        lines = [("\n" if at == 0 else "", line) for at, line in enumerate(_cut(_calm(spans), room))]
    else:
        lines = list(wrap(spans, min(room, max(MEASURE - taken, 20))))
    return [
        _line(row.first if at == 0 else row.rest, line, palette, ground, joint=joint, fill=fill)
        for at, (joint, line) in enumerate(lines)
    ]


def wrap(spans: Iterable[Span], width: int) -> Iterator[tuple[str, list[Span]]]:
    """Breaks at blanks and between wide characters; longer words wherever they must.

    Yields each line with its joint (see Line).
    """
    line: list[Span] = []
    joint = "\n"
    used = 0
    blanks: list[Span] = []
    for word in _words(spans):
        if word[0].text.isspace():
            blanks += word
            continue
        gap = sum(len(span.text) for span in blanks)
        size = _cells(word)
        if line and used + gap + size > width:
            yield joint, _joined(line)
            line, used, joint = [], 0, " " * gap
        elif line or gap < width // 2:
            line += blanks
            used += gap
        blanks = []
        if size <= width - used:
            line += word
            used += size
            continue
        *full, line = _cut(line + word, width)
        for piece in full:
            yield joint, _joined(piece)
            joint = ""
        used = _cells(line)
    yield joint, _joined(line)


def _words(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Pieces between which a line may break; a word whose look changes in its middle is one piece."""
    word: list[Span] = []
    for span in spans:
        for found in _WORD.finditer(span.text):
            text = found[0]
            joins = word and not text[0].isspace() and not word[-1].text[-1].isspace() and found.start() == 0
            if joins and cell_len(text[0]) < 2 and cell_len(word[-1].text[-1]) < 2:
                word.append(Span(text, span.look))
                continue
            if word:
                yield word
            word = [Span(text, span.look)]
    if word:
        yield word


def _cut(spans: Iterable[Span], width: int) -> list[list[Span]]:
    """Cuts at exactly `width` cells, never inside a character of several code points."""
    lines: list[list[Span]] = [[]]
    used = 0
    for text, look in spans:
        begin = 0
        graphemes, _ = (
            split_graphemes(text) if not text.isascii() else ([(at, at + 1, 1) for at in range(len(text))], 0)
        )
        for start, _end, size in graphemes:
            if used + size > width and used:
                lines[-1].append(Span(text[begin:start], look))
                lines.append([])
                begin, used = start, 0
            used += size
        lines[-1].append(Span(text[begin:], look))
    return lines


def _graphemes(text: str) -> Iterator[tuple[int, int]]:
    """Start and cells of each character as a reader sees it."""
    if text.isascii():
        return ((at, 1) for at in range(len(text)))
    return ((start, size) for start, _, size in split_graphemes(text)[0])


def _calm(spans: Iterable[Span]) -> list[Span]:
    """Blanks take the colour before them: every change of it is bytes to the terminal."""
    calm: list[Span] = []
    for span in spans:
        calm.append(Span(span.text, calm[-1].look) if calm and span.text.isspace() else span)
    return _joined(calm)


def _joined(line: list[Span]) -> list[Span]:
    """Neighbours of one look become one span: fewer bytes to the terminal."""
    joined: list[Span] = []
    for span in line:
        if not span.text:
            continue
        if joined and joined[-1].look == span.look:
            joined[-1] = Span(joined[-1].text + span.text, span.look)
        else:
            joined.append(span)
    return joined


def _line(
    before: Iterable[Span], spans: list[Span], palette: Palette, ground: str, *, joint: str = "\n", fill: int = 0
) -> Line:
    prefix = list(before)
    inner = "surface" if fill else ground
    edge = prefix.pop() if fill else None
    segments = [Segment(text, palette.style(look, ground)) for text, look in prefix if text]
    if edge:
        segments.append(Segment(edge.text, palette.style(edge.look, inner)))
        prefix.append(edge)
    segments += [Segment(text, palette.style(look, inner)) for text, look in spans]
    used = _cells(prefix) + _cells(spans)
    if fill > used:
        segments.append(Segment(" " * (fill - used), palette.style(PLAIN, inner)))
    start = sum(len(span.text) for span in prefix)
    return Line(Strip(segments, max(used, fill)), "".join(span.text for span in spans), start, joint)


def _table(table: TableRow, width: int, palette: Palette, ground: str) -> Iterator[Line]:
    rows = [table.header, *table.body]
    columns = len(table.aligns)
    room = width - _cells(table.first) - 3 * (columns - 1)
    widths = _column_widths([[_cells(row[at]) for row in rows if at < len(row)] for at in range(columns)], room)
    bar = Span(" │ ", Look("border"))
    first = True
    for at, row in enumerate(rows):
        cells = [
            [line for _, line in wrap((_bold(span) for span in cell) if at == 0 else cell, size)]
            for cell, size in zip(row, widths, strict=False)
        ]
        for part in range(max(map(len, cells), default=1)):
            spans: list[Span] = []
            for column, size in enumerate(widths):
                cell = cells[column][part] if column < len(cells) and part < len(cells[column]) else []
                spans += [bar] if column else []
                spans += _aligned(cell, size, table.aligns[column])
            yield _line(table.first if first else table.rest, spans, palette, ground)
            first = False
        if at == 0:
            rule = Span("─┼─".join("─" * size for size in widths), Look("border"))
            yield _line(table.rest, [rule], palette, ground)


def _column_widths(columns: list[list[int]], room: int) -> list[int]:
    """As wide as the widest cell; where that is too much, the widest columns give way first."""
    widths = [max(1, *column, 1) for column in columns]
    level = max(widths)
    if sum(widths) > room:
        level = next(
            (cap for cap in range(min(level, room), 1, -1) if sum(min(size, cap) for size in widths) <= room), 1
        )
    return [min(size, level) for size in widths]


def _aligned(cell: list[Span], size: int, align: str) -> list[Span]:
    space = max(0, size - _cells(cell))
    left = {"left": 0, "right": space, "center": space // 2}[align]
    return [Span(" " * left), *cell, Span(" " * (space - left))]


def _bold(span: Span) -> Span:
    return Span(span.text, span.look._replace(bold=True))


def _cells(spans: Iterable[Span]) -> int:
    return sum(cell_len(span.text) for span in spans)


def _colour(value: str) -> Color:
    return Color.parse(value.removeprefix("ansi_"))
