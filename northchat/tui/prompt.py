"""Where the user types: several lines, a history that outlives the session, completion of slash commands."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static, TextArea

from northchat.sanitize import clean
from northchat.tui.inline import PLAIN, Look
from northchat.tui.layout import Palette

HISTORY = 1_000
MAX_CHOICES = 8


class Choice(NamedTuple):
    """A completion: `text` replaces the whole prompt."""

    text: str
    summary: str
    final: bool
    """Nothing more can follow: accepting it with Enter sends it."""


Completer = Callable[[str], list[Choice]]


class History:
    """What was sent, oldest first; one JSON string per line, so that messages may have several lines."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._entries: list[str] | None = None
        self._at = 0
        self._draft = ""

    def add(self, text: str) -> None:
        entries = self._load()
        self._at = len(entries)
        if entries[-1:] == [text]:
            return
        entries.append(text)
        self._at = len(entries)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "a", encoding="utf-8", opener=_private) as lines:
                lines.write(json.dumps(text) + "\n")
        except OSError:
            pass  # a history that can't be kept is no reason to stop a conversation

    def older(self, draft: str) -> str | None:
        entries = self._load()
        if self._at == 0:
            return None
        if self._at == len(entries):
            self._draft = draft
        self._at -= 1
        return entries[self._at]

    def newer(self) -> str | None:
        entries = self._load()
        if self._at == len(entries):
            return None
        self._at += 1
        return entries[self._at] if self._at < len(entries) else self._draft

    def _load(self) -> list[str]:
        if self._entries is None:
            try:
                lines = self._file.read_text("utf-8", errors="replace").splitlines()
            except OSError:
                lines = []
            self._entries = [text for line in lines[-HISTORY:] if (text := _entry(line))]
            self._at = len(self._entries)
        return self._entries


def _entry(line: str) -> str:
    try:
        text = json.loads(line)
    except ValueError:
        return ""  # a line torn by a crash
    return clean(text) if isinstance(text, str) else ""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Completions(Widget):
    """The choices for what is typed, one a line, under a moving mark."""

    DEFAULT_CSS = "Completions { height: auto; display: none; background: $background; padding: 0 1; }"

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self.palette = palette
        self.choices: list[Choice] = []
        self.at = 0

    @property
    def chosen(self) -> Choice | None:
        return self.choices[self.at] if self.choices else None

    def show(self, choices: list[Choice]) -> None:
        if choices != self.choices:
            self.choices, self.at = choices, 0
            self.display = bool(choices)
            self.refresh(layout=True)

    def move(self, step: int) -> None:
        self.at = (self.at + step) % len(self.choices)
        self.refresh()

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return min(len(self.choices), MAX_CHOICES)

    def render_line(self, y: int) -> Strip:
        first = max(0, min(self.at - MAX_CHOICES // 2, len(self.choices) - MAX_CHOICES))
        choice = self.choices[first + y] if first + y < len(self.choices) else Choice("", "", False)
        chosen = first + y == self.at
        ground = "panel" if chosen else "background"
        column = max(cell_len(each.text) for each in self.choices) + 2 if self.choices else 0
        mark = Segment("❯ " if chosen else "  ", self.palette.style(Look("primary", bold=True), ground))
        name = Segment(
            clean(choice.text).ljust(column), self.palette.style(Look("primary" if chosen else "foreground"), ground)
        )
        summary = Segment(clean(choice.summary), self.palette.style(Look("muted"), ground))
        return Strip([mark, name, summary]).crop_extend(0, self.size.width, self.palette.style(PLAIN, ground))


class PromptArea(TextArea):
    """The text itself. Keys that mean something to the conversation become messages."""

    BINDINGS: ClassVar = [
        Binding("pageup", "app.scroll_page(-1)", show=False),
        Binding("pagedown", "app.scroll_page(1)", show=False),
        Binding("ctrl+z,super+z", "app.suspend_process", show=False),
        Binding("ctrl+underscore", "undo", show=False),
        Binding("ctrl+c,super+c", "app.interrupt", show=False),
    ]

    def __init__(self, prompt: "Prompt") -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            compact=True,
            placeholder="Ask anything   / for commands",
        )
        self.cursor_blink = False  # an idle terminal gets no bytes
        self._prompt = prompt

    async def _on_key(self, event: events.Key) -> None:
        if self._prompt.key(event.key):
            event.stop()
            event.prevent_default()
            return
        # Bindings usually run once a key has bubbled up to the app; letters typed meanwhile would overtake a backspace.
        bindings = self._bindings.key_to_bindings.get(event.key, [])
        if bindings and not event.is_printable:
            event.stop()
            event.prevent_default()
            await self.run_action(bindings[0].action)
            return
        await super()._on_key(event)

    async def _on_paste(self, event: events.Paste) -> None:
        event.text = clean(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        await super()._on_paste(event)

    def action_delete_right(self) -> None:
        if self.text:
            super().action_delete_right()
        else:
            self.post_message(Prompt.Leave())


class Prompt(Widget):
    DEFAULT_CSS = """
    Prompt { height: auto; background: $background; }
    Prompt #box { height: auto; border: round $rule; padding: 0 1; background: $background; }
    Prompt #mark { width: 2; color: $primary; text-style: bold; background: $background; }
    Prompt PromptArea {
        width: 1fr; height: auto; max-height: 10; border: none; padding: 0;
        background: $background; color: $foreground; scrollbar-size-vertical: 1;
        & .text-area--placeholder { color: $muted; }
    }
    """

    class Submitted(Message):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Leave(Message):
        """Ctrl+D on an empty prompt."""

    class Asked(Message):
        """? on an empty prompt."""

    def __init__(self, history: History, complete: Completer, palette: Palette) -> None:
        super().__init__()
        self._history = history
        self._complete = complete
        self._area = PromptArea(self)
        self._completions = Completions(palette)

    def compose(self) -> ComposeResult:
        yield self._completions
        with Horizontal(id="box"):
            yield Static("❯ ", id="mark", markup=False)
            yield self._area

    def set_palette(self, palette: Palette) -> None:
        self._completions.palette = palette
        self._completions.refresh()

    @property
    def text(self) -> str:
        return self._area.text

    @text.setter
    def text(self, text: str) -> None:
        self._area.text = text
        self._area.move_cursor(self._area.document.end)

    @property
    def selected_text(self) -> str:
        return self._area.selected_text

    def focus_text(self) -> None:
        self._area.focus()

    def close_completions(self) -> bool:
        """Whether any were open."""
        were_open = bool(self._completions.choices)
        self._completions.show([])
        return were_open

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        event.stop()
        text = self.text
        self._completions.show(self._complete(text) if text.startswith("/") and "\n" not in text else [])

    def key(self, key: str) -> bool:
        """Whether the key was used up."""
        match key:
            case "enter":
                self._enter()
            case "shift+enter" | "ctrl+j" | "alt+enter" | "ctrl+enter":
                self._area.insert("\n")
            case "tab" | "shift+tab":
                if choice := self._completions.chosen:
                    self.text = choice.text
            case "up" | "down" if self._completions.choices:
                self._completions.move(-1 if key == "up" else 1)
            case "up" if self._area.cursor_at_first_line:
                return self._recall(self._history.older(self.text))
            case "down" if self._area.cursor_at_last_line:
                return self._recall(self._history.newer())
            case "question_mark" if not self.text:
                self.post_message(self.Asked())
            case _:
                return False
        return True

    def _enter(self) -> None:
        area = self._area
        row, column = area.cursor_location
        if column and area.document[row][column - 1] == "\\":
            area.replace("\n", (row, column - 1), (row, column))
            return
        choice = self._completions.chosen
        if choice and choice.text.rstrip() != self.text.rstrip():
            self.text = choice.text
            if not choice.final:
                return
        text = self.text.strip()
        self.text = ""
        self.close_completions()
        if text:
            self._history.add(text)
        self.post_message(self.Submitted(text))

    def _recall(self, text: str | None) -> bool:
        if text is None:
            return False
        self.text = text
        self.close_completions()
        return True
