"""Fewer bytes to the terminal: Textual writes every piece of text with its whole style and then resets it.

Over ssh a scrolling answer would cost kilobytes a token. Here a style is sent as its difference to the one before, and
a long run of blanks as an erasure where the terminal erases in the current colour.
"""

import codecs
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from textual.driver import Driver

_SGR = re.compile(r"\x1b\[([\d;]*)m")
_MOVES = re.compile(r"(?:\x1b\[\d*;?\d*H|\n)*")
"""Cursor movements, which no style changes."""
_BLANKS = re.compile(r" {14,}")
_VISIBLE_ON_BLANKS = {"4", "7", "9", "21", "53"}
"""Underline, reverse, strike, double underline, overline: an erased cell doesn't have them."""


class _Style(NamedTuple):
    attributes: frozenset[str]
    foreground: str
    background: str


def thrifty(frame: str, erases_in_colour: bool) -> str:
    """The same cells for one frame, which must begin and end without a style."""
    pieces: list[str] = []
    now = wanted = ""
    for at, part in enumerate(_SGR.split(frame)):
        if at % 2:
            wanted = "" if part == "0" else part
            continue
        moves = _MOVES.match(part)
        end = moves.end() if moves else 0
        pieces.append(part[:end])
        if text := part[end:]:
            pieces.append(_change(now, wanted))
            now = wanted
            if erases_in_colour and not _style(now).attributes & _VISIBLE_ON_BLANKS:
                text = _BLANKS.sub(_erase, text)
            pieces.append(text)
    pieces.append(_change(now, ""))
    return "".join(pieces)


def thrifty_driver(base: "type[Driver]") -> "type[Driver]":
    """A driver that writes thriftily. Each write is one frame, or control sequences without a style.

    It also reads leniently: bytes that are no UTF-8, in a paste, would end Textual's thread of input.
    """
    from textual.drivers import linux_driver

    linux_driver.getincrementaldecoder = _lenient_decoder  # type: ignore[attr-defined, assignment]
    erases = _erases_in_colour()

    class ThriftyDriver(base):  # type: ignore[misc, valid-type]
        def write(self, data: str) -> None:
            super().write(thrifty(data, erases) if "m" in data else data)

    return ThriftyDriver


def _lenient_decoder(encoding: str) -> Callable[[], codecs.IncrementalDecoder]:
    return partial(codecs.getincrementaldecoder(encoding), "replace")


def _erase(blanks: re.Match[str]) -> str:
    count = len(blanks[0])
    return f"\x1b[{count}X\x1b[{count}C"


@lru_cache(maxsize=4096)
def _change(now: str, wanted: str) -> str:
    if now == wanted:
        return ""
    old, new = _style(now), _style(wanted)
    if not wanted or old.attributes - new.attributes:
        return f"\x1b[0;{wanted}m" if wanted else "\x1b[0m"
    codes = sorted(new.attributes - old.attributes)
    if new.foreground != old.foreground:
        codes.append(new.foreground or "39")
    if new.background != old.background:
        codes.append(new.background or "49")
    return f"\x1b[{';'.join(codes)}m" if codes else ""


@lru_cache(maxsize=4096)
def _style(sgr: str) -> _Style:
    attributes: set[str] = set()
    foreground = background = ""
    codes = sgr.split(";") if sgr else []
    while codes:
        code = codes.pop(0)
        if code in ("38", "48"):
            length = 4 if codes[:1] == ["2"] else 2
            code, codes = ";".join([code, *codes[:length]]), codes[length:]
        if code.startswith("38;") or code in ("39", *map(str, (*range(30, 38), *range(90, 98)))):
            foreground = code
        elif code.startswith("48;") or code in ("49", *map(str, (*range(40, 48), *range(100, 108)))):
            background = code
        else:
            attributes.add(code)
    return _Style(frozenset(attributes), foreground, background)


def _erases_in_colour() -> bool:
    try:
        import curses

        curses.setupterm()
        return curses.tigetflag("bce") > 0
    except Exception:  # no curses, no such terminal: do without
        return False
