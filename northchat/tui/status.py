"""The line at the bottom: who answers, what it is doing, how fast, and how full its context is."""

from typing import NamedTuple

import msgspec
from rich.cells import cell_len
from rich.segment import Segment
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget

from northchat.agent import wording
from northchat.messages import Stats
from northchat.sanitize import clean
from northchat.tui.inline import PLAIN, Look
from northchat.tui.layout import Palette

SEPARATOR = " · "
TICK_S = 1 / 4
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
ROLES = {"ready": "success", "failed": "error", "stopped": "warning"}


class State(msgspec.Struct, frozen=True):
    """`phase` is one word; `detail` says more of it, such as how far a download is."""

    phase: str = "starting"
    detail: str = ""
    model: str = ""
    device: str = ""
    remote: str = ""
    """Host of a server that isn't ours; it is always shown."""
    limits: str = ""
    """What the model can't do, such as `chat only`."""
    stats: Stats = msgspec.field(default_factory=Stats)
    hint: str = ""
    """For a moment, in place of everything else."""
    tick: int = 0

    @property
    def busy(self) -> bool:
        return self.phase not in ("ready", "failed", "stopped")


class Part(NamedTuple):
    text: str
    role: str
    rank: int
    """The lowest goes first when the line is too narrow; 9 never goes."""
    right: bool = False


def parts(state: State) -> list[Part]:
    if state.hint:
        return [Part(state.hint, "warning", 9)]
    stats = state.stats
    cached = f"{stats.cached_tokens:,} cached" if stats.cached_tokens else ""
    first = f"TTFT {stats.ttft_s:.2f} s" if stats.ttft_s is not None else ""
    found = [
        Part(f"{_mark(state)} {state.phase}", ROLES.get(state.phase, "primary"), 9),
        Part(state.detail, "foreground", 8),
        Part(wording.speed(stats), "foreground", 7),
        Part(first, "muted", 3),
        Part(cached, "muted", 1, right=True),
        Part(wording.context(stats), "muted", 4, right=True),
        Part(state.limits, "warning", 5, right=True),
        Part(state.model, "foreground", 6, right=True),
        Part(f"at {state.remote}" if state.remote else "", "warning", 9, right=True),
        Part(state.device, "muted", 2, right=True),
    ]
    return [part._replace(text=clean(part.text)) for part in found if part.text]


def fit(shown: list[Part], width: int) -> list[Part]:
    """Drops parts by rank until the rest fits `width` cells."""
    while len(shown) > 1 and _length(shown) > width:
        least = min(shown, key=lambda part: part.rank)
        if least.rank == 9:
            break
        shown = [part for part in shown if part is not least]
    return shown


def _length(shown: list[Part]) -> int:
    return sum(cell_len(part.text) for part in shown) + len(SEPARATOR) * (len(shown) - 1)


def _mark(state: State) -> str:
    return SPINNER[state.tick % len(SPINNER)] if state.busy else "●"


class StatusBar(Widget):
    """Redrawn in place: a change never causes a layout."""

    DEFAULT_CSS = "StatusBar { height: 1; background: $background; }"

    def __init__(self, palette: Palette, state: State) -> None:
        super().__init__()
        self._palette = palette
        self.state = state
        self._ticker: Timer | None = None

    def set_palette(self, palette: Palette) -> None:
        self._palette = palette
        self.refresh()

    def on_mount(self) -> None:
        self._ticker = self.set_interval(TICK_S, self._tick)

    def _tick(self) -> None:
        self.state = msgspec.structs.replace(self.state, tick=self.state.tick + 1)
        self.refresh()

    def show(self, **changes: object) -> None:
        state = msgspec.structs.replace(self.state, **changes)
        if state == self.state:
            return
        self.state = state
        self.refresh()
        if self._ticker is not None:
            # At rest nothing moves, so that an idle terminal gets no bytes.
            (self._ticker.resume if state.busy else self._ticker.pause)()

    def render_line(self, y: int) -> Strip:
        # One blank column at each side, in line with the prompt's frame.
        room = self.size.width - 2
        shown = fit(parts(self.state), room)
        left = self._strip([part for part in shown if not part.right])
        right = self._strip([part for part in shown if part.right])
        ground = self._palette.style(PLAIN)
        gap = max(len(SEPARATOR) if right.cell_length else 0, room - left.cell_length - right.cell_length)
        line = Strip.join([Strip.blank(1, ground), left, Strip.blank(gap, ground), right])
        return line.crop_extend(0, self.size.width, ground)

    def _strip(self, shown: list[Part]) -> Strip:
        segments: list[Segment] = []
        for part in shown:
            if segments:
                segments.append(Segment(SEPARATOR, self._palette.style(Look("border"))))
            segments.append(Segment(part.text, self._palette.style(Look(part.role))))
        return Strip(segments)
