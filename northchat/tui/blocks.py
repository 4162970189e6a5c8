"""What a transcript is made of: each block turns what happened into rows and keeps their screen lines."""

import time

from northchat import version
from northchat.sanitize import clean
from northchat.tui.inline import PLAIN, Look, Span
from northchat.tui.layout import Line, Palette, lay_out
from northchat.tui.markdown import BLANK, AnyRow, Markdown, Row

MUTED = Look("muted")
MAX_USER_ROWS = 12
"""Of a longer message so many lines are shown; it is known to who wrote it."""


class Block:
    """One entry. `rows` only grows, `tail()` may change; both are laid out once per change."""

    ground = "background"
    gutter = Span("  ")

    def __init__(self) -> None:
        self.rows: list[AnyRow] = []
        self.lines: list[Line] = []
        self._laid: tuple[int, Palette] | None = None
        self._final_rows = 0
        self._final_lines = 0

    def tail(self) -> list[AnyRow]:
        return []

    def click(self) -> bool:
        """Whether the click changed the block."""
        return False

    def stale(self, width: int, palette: Palette) -> bool:
        return self._laid is None or self._laid[0] != width or self._laid[1] is not palette

    def reset(self) -> None:
        """The rows are other ones now."""
        self._laid = None

    def lay_out(self, width: int, palette: Palette) -> int:
        """Brings `lines` up to date; the index of the first one that changed."""
        if self.stale(width, palette):
            self.lines = []
            self._final_rows = self._final_lines = 0
            self._laid = (width, palette)
        old = self.lines[self._final_lines :]
        del self.lines[self._final_lines :]
        for row in self.rows[self._final_rows :]:
            self.lines += self._lay_row(row, width, palette)
        first, self._final_rows, self._final_lines = self._final_lines, len(self.rows), len(self.lines)
        for row in self.tail():
            self.lines += self._lay_row(row, width, palette)
        for before, now in zip(old, self.lines[first:], strict=False):
            if before.strip != now.strip:
                break
            first += 1
        return first

    def _lay_row(self, row: AnyRow, width: int, palette: Palette) -> list[Line]:
        row = row._replace(first=(self.gutter, *row.first), rest=(self.gutter, *row.rest))
        return lay_out(row, width, palette, self.ground)


class Welcome(Block):
    """What an empty conversation begins with."""

    def __init__(self) -> None:
        super().__init__()
        name = Span("northchat", Look("primary", bold=True))
        self.rows = [
            Row("text", (name, Span(f"  {version.current()}".replace("  unknown", ""), MUTED))),
            *_plain("Ask a question. / lists commands, ? shows keys, Esc stops an answer.", MUTED),
        ]


class UserText(Block):
    """What was sent. Of a long text the start, until a click unfolds it."""

    ground = "panel"
    gutter = Span("▌ ", Look("primary"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self._whole = _plain(text)
        self._folded = len(self._whole) > MAX_USER_ROWS + 4
        self._fill()

    def click(self) -> bool:
        if len(self._whole) <= MAX_USER_ROWS + 4:
            return False
        self._folded = not self._folded
        self._fill()
        self.reset()
        return True

    def _fill(self) -> None:
        self.rows = self._whole
        if self._folded:
            more = Row("text", (Span(f"▸ {len(self._whole) - MAX_USER_ROWS:,} more lines", MUTED),))
            self.rows = [*self._whole[:MAX_USER_ROWS], more]


class Answer(Block):
    """The assistant's Markdown, as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self._markdown = Markdown()
        self.rows = self._markdown.rows
        self._ended = False

    def write(self, text: str) -> None:
        self._markdown.write(text)

    def end(self, remark: str = "") -> None:
        """No more text comes; `remark` says why when that isn't plain."""
        self._markdown.close()
        self._ended = True
        if remark:
            self.rows += [BLANK, Row("text", (Span(remark, MUTED._replace(italic=True)),))]

    def tail(self) -> list[AnyRow]:
        return [] if self._ended else self._markdown.tail()


class Thinking(Block):
    """Reasoning: its last line while it comes, one line once it is over, everything when unfolded."""

    def __init__(self) -> None:
        super().__init__()
        self.folded = True
        self._text = ""
        self._began = time.monotonic()
        self._seconds: float | None = None

    def write(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        if self._seconds is None:
            self._seconds = time.monotonic() - self._began

    def click(self) -> bool:
        self.folded = not self.folded
        self.reset()
        return True

    def tail(self) -> list[AnyRow]:
        mark = "▸" if self.folded else "▾"
        label = "Thinking" if self._seconds is None else f"Thought for {self._seconds:.0f} s"
        head = Row("text", (Span(f"{mark} {label}", MUTED),))
        lines = [line for line in _plain(self._text.strip(), MUTED._replace(italic=True)) if isinstance(line, Row)]
        if self.folded:
            lines = lines[-1:] if self._seconds is None else []
        indent = (Span("  "),)
        return [head, *(line._replace(first=indent, rest=indent) for line in lines)]


class Notice(Block):
    """One quiet line (or a few) from the app itself."""

    def __init__(self, text: str, role: str = "muted") -> None:
        super().__init__()
        self.rows = _plain(text, Look(role))


class Failure(Block):
    """What went wrong, what to do about it, and whether a key tries again."""

    gutter = Span("▌ ", Look("error"))

    def __init__(self, message: str, remedy: str = "", hint: str = "") -> None:
        super().__init__()
        self.rows = _plain(message, Look("error", bold=True))
        self.rows += _plain(remedy) if remedy else []
        self.rows += _plain(hint, MUTED) if hint else []


class Listing(Block):
    """A heading and lines of (name, what it does)."""

    def __init__(self, title: str, entries: list[tuple[str, str]]) -> None:
        super().__init__()
        width = max((len(name) for name, _ in entries), default=0) + 2
        self.rows = [Row("text", (Span(clean(title), Look(bold=True)),))]
        for name, what in entries:
            label = Span(clean(name).ljust(width), Look("primary"))
            self.rows.append(Row("text", (Span(clean(what)),), (label,), (Span(" " * width),)))


def _plain(text: str, look: Look = PLAIN) -> list[AnyRow]:
    return [Row("text", (Span(line, look),) if line else ()) for line in clean(text).expandtabs(4).split("\n")]
