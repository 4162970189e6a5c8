"""Markdown, blocks and whole screens as lines of text."""

from collections.abc import Iterable

from textual.app import App

from northchat.tui import theme
from northchat.tui.layout import Line, Palette, lay_out
from northchat.tui.markdown import Markdown

PALETTE = Palette(theme.load("dark"))


def lines_of(chunks: Iterable[str], width: int = 60) -> list[Line]:
    markdown = Markdown()
    for chunk in chunks:
        markdown.write(chunk)
        markdown.tail()
    markdown.close()
    return [line for row in markdown.rows for line in lay_out(row, width, PALETTE)]


def shown(text: str, width: int = 60) -> list[str]:
    return [line.strip.text.rstrip() for line in lines_of([text], width)]


def screen(app: App[None]) -> list[str]:
    """What a terminal would show, without the blank lines."""
    strips = app.screen._compositor.render_strips()
    return [text for strip in strips if (text := strip.text.rstrip())]
