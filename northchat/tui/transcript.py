"""The conversation on screen: one scrolling widget over blocks, drawing only the lines that show."""

import time
from bisect import bisect_right
from itertools import accumulate

from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from northchat.tui.blocks import Block
from northchat.tui.inline import PLAIN, Look
from northchat.tui.layout import Line, Palette

SLICE_S = 0.008
"""Time that one go at re-wrapping off-screen blocks may take; a key typed meanwhile waits so long."""


class Transcript(ScrollView, can_focus=False):
    """Follows the end unless the user scrolled up.

    After a change of width or theme, what shows is laid out at once and the rest in slices; until its turn a block
    keeps its old lines, and the line at the top of the view stays where it is.
    """

    DEFAULT_CSS = """
    Transcript {
        background: $background;
        overflow-x: hidden;
        overflow-y: scroll;
        scrollbar-size-vertical: 1;
    }
    """

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self.follow = True
        self._palette = palette
        self._blocks: list[Block] = []
        self._starts: list[int] = [0]
        """First line of each block, and one past the last: a blank line stands before each block."""
        self._unseen = False
        self._refitting = False

    # -- content ---------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[Block]:
        return list(self._blocks)

    def add(self, block: Block) -> None:
        self._blocks.append(block)
        self._starts.append(self._starts[-1])
        self.changed(block)

    def discard(self, block: Block) -> None:
        self._blocks.remove(block)
        self._measure()

    def clear(self) -> None:
        self._blocks.clear()
        self.follow = True
        self._measure()

    def changed(self, block: Block) -> None:
        """The block's rows grew or changed: lay out and draw what is new."""
        if not self._width:
            return
        index = len(self._blocks) - 1 if block is self._blocks[-1] else self._blocks.index(block)
        first = block.lay_out(self._width, self._palette)
        was_last_line = self._starts[-1]
        self._measure(index)
        if self.follow:
            self.scroll_end(animate=False, immediate=True, x_axis=False)
        elif index == len(self._blocks) - 1:
            self._unseen = True
            self._refresh_mark()
        top = self._starts[index] + 1 + first - self.scroll_offset.y
        moved = self._starts[-1] != was_last_line and index != len(self._blocks) - 1
        bottom = self.size.height if moved else self._starts[index + 1] - self.scroll_offset.y
        if bottom > max(top, 0):
            self.refresh(Region(0, max(top, 0), self.size.width, min(bottom, self.size.height) - max(top, 0)))

    def set_palette(self, palette: Palette) -> None:
        self._palette = palette
        self._refit()

    @property
    def plain(self) -> list[str]:
        """All lines as text, as tests and copying read them."""
        lines: list[str] = []
        for block in self._blocks:
            lines += ["", *(line.strip.text.rstrip() for line in block.lines)]
        return lines

    # -- geometry --------------------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        """Columns of text: a blank one keeps it off the scrollbar."""
        return max(0, self.size.width - 1)

    def _measure(self, index: int = 0) -> None:
        """Recounts lines from block `index` on."""
        heights = (len(block.lines) + 1 for block in self._blocks[index:])
        self._starts[index:] = accumulate(heights, initial=self._starts[index] if index else 0)
        # A blank line at the end keeps the last words off the prompt.
        self.virtual_size = Size(self.size.width, self._starts[-1] + 1)

    def _refit(self) -> None:
        if not self._width:
            return
        top, height = self.scroll_offset.y, self.size.height
        anchor = self._locate(top)
        at = len(self._blocks) - 1 if self.follow else anchor[0]
        step, filled = (-1, 0) if self.follow else (1, -anchor[1])
        while 0 <= at < len(self._blocks) and filled < height:
            self._blocks[at].lay_out(self._width, self._palette)
            filled += len(self._blocks[at].lines) + 1
            at += step
        self._settle(anchor)
        if not self._refitting:
            self._refitting = True
            self.call_later(self._refit_slice)

    def _refit_slice(self) -> None:
        """Lays out some of the blocks that still are as wide as before, the latest first."""
        end = time.thread_time() + SLICE_S
        anchor = self._locate(self.scroll_offset.y)
        for block in reversed(self._blocks):
            if not block.stale(self._width, self._palette):
                continue
            if time.thread_time() > end:
                self.set_timer(0.02, self._refit_slice)
                break
            block.lay_out(self._width, self._palette)
        else:
            self._refitting = False
        self._settle(anchor)

    def _settle(self, anchor: tuple[int, int]) -> None:
        """Recounts everything and brings line `anchor` (block, line in it) back to the top of the view."""
        self._measure()
        if self.follow:
            self.scroll_end(animate=False, immediate=True, x_axis=False)
        else:
            index, line = anchor
            self.scroll_to(y=self._starts[index] + line, animate=False, immediate=True)
        self.refresh()

    def _locate(self, y: int) -> tuple[int, int]:
        index = min(max(bisect_right(self._starts, y) - 1, 0), max(len(self._blocks) - 1, 0))
        return index, max(0, y - self._starts[index])

    def _line_at(self, y: int) -> tuple[Block, Line] | None:
        if not 0 <= y < self._starts[-1]:
            return None
        index, line = self._locate(y)
        block = self._blocks[index]
        return (block, block.lines[line - 1]) if 0 < line <= len(block.lines) else None

    # -- drawing ---------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        at = y + self.scroll_offset.y
        found = self._line_at(at)
        if found is None:
            strip = Strip.blank(width, self._palette.style(PLAIN))
        else:
            block, line = found
            strip = self._selected(line, at) if self.text_selection else line.strip
            strip = strip.crop_extend(0, width, self._palette.style(PLAIN, block.ground)).apply_offsets(0, at)
        return self._marked(strip) if self._unseen and y == self.size.height - 1 else strip

    def _marked(self, strip: Strip) -> Strip:
        mark = " ↓ new output · Ctrl+End "
        chip = Strip([Segment(mark, self._palette.style(Look("primary", bold=True), "panel"))], len(mark))
        return Strip.join([strip.crop(0, max(0, self.size.width - len(mark) - 2)), chip]).crop_extend(
            0, self.size.width, self._palette.style(PLAIN)
        )

    def _refresh_mark(self) -> None:
        self.refresh(Region(0, self.size.height - 1, self.size.width, 1))

    # -- events ----------------------------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        self._refit()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.follow = round(new_value) >= self.max_scroll_y
        if self.follow and self._unseen:
            self._unseen = False
            self._refresh_mark()

    def on_click(self, event: events.Click) -> None:
        found = self._line_at(event.y + self.scroll_offset.y)
        if found and not self.text_selection and found[0].click():
            self.changed(found[0])

    # -- selection -------------------------------------------------------------------------------------------------

    def _selected(self, line: Line, y: int) -> Strip:
        selection = self.text_selection
        span = selection.get_span(y) if selection else None
        if span is None:
            return line.strip
        start, end = max(span[0], line.start), line.start + len(line.text)
        end = end if span[1] < 0 else min(end, span[1])
        if start >= end:
            return line.strip
        text = line.strip.text
        left, right = (cell_len(text[:at]) for at in (start, end))
        style = self.screen.get_component_rich_style("screen--selection")
        inside = [Segment(piece, (old or style) + style) for piece, old, _ in line.strip.crop(left, right)]
        return Strip.join([line.strip.crop(0, left), Strip(inside, right - left), line.strip.crop(right)])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The text as it was written: without gutters, and with wrapped lines joined again."""
        copied = ""
        first = selection.start.y if selection.start else 0
        last = selection.end.y if selection.end else self._starts[-1] - 1
        for y in range(first, min(last, self._starts[-1] - 1) + 1):
            span = selection.get_span(y)
            if span is None:
                continue
            found = self._line_at(y)
            text, joint = "", "\n"
            if found:
                line = found[1]
                begin = max(0, span[0] - line.start)
                text = line.text[begin:] if span[1] < 0 else line.text[begin : max(0, span[1] - line.start)]
                joint = line.joint
            copied += (joint if y > first else "") + text
        return copied, "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()
