"""Questions that must be answered before going on. No key typed before a dialog could be read decides it."""

import time
from collections.abc import Callable
from typing import ClassVar, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from northchat.sanitize import clean

GRACE_S = 0.5
"""Keys are ignored for so long after a dialog appears, and again after each key typed in that time."""


Result = TypeVar("Result")


class Dialog(ModalScreen[Result]):
    """Its style sheet is the app's: defaults of the widgets inside would outweigh one of its own."""


class Confirm(Dialog[bool]):
    """A yes or no question; Esc is no."""

    def __init__(self, title: str, lines: list[str], yes: str, no: str) -> None:
        super().__init__()
        self._texts = [clean(title), *map(clean, lines)]
        self._hint = f"y  {yes}      n  {no}"
        self._deaf_until = float("inf")

    def compose(self) -> ComposeResult:
        title, *lines = self._texts
        with Vertical():
            yield Static(title, classes="title", markup=False)
            for line in lines:
                yield Static(line, classes="text", markup=False)
            yield Static(self._hint, classes="hint", markup=False)

    def on_mount(self) -> None:
        self.call_after_refresh(self._listen)

    def _listen(self) -> None:
        self._deaf_until = time.monotonic() + GRACE_S

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        if time.monotonic() < self._deaf_until:
            self._listen()
        elif event.key == "y":
            self.dismiss(True)
        elif event.key in ("n", "escape"):
            self.dismiss(False)


class Picker(Dialog[str]):
    """Choose one of a list; `preview` is told each entry that the mark comes to."""

    BINDINGS: ClassVar = [Binding("escape", "leave", show=False)]

    def __init__(
        self,
        title: str,
        entries: list[tuple[str, str, str]],
        current: str,
        preview: Callable[[str], None] = lambda key: None,
    ) -> None:
        """`entries` are (key, name, summary)."""
        super().__init__()
        self._title = title
        self._entries = entries
        self._current = current
        self._preview = preview

    def compose(self) -> ComposeResult:
        width = max((len(name) for _, name, _ in self._entries), default=0) + 2
        options = [
            Option(Content.assemble(clean(name).ljust(width), (clean(summary), "$muted")), id=str(at))
            for at, (_, name, summary) in enumerate(self._entries)
        ]
        with Vertical():
            yield Static(clean(self._title), classes="title", markup=False)
            yield OptionList(*options, markup=False)
            yield Static("↑↓ choose   Enter take   Esc leave", classes="hint", markup=False)

    def on_mount(self) -> None:
        keys = [key for key, _, _ in self._entries]
        options = self.query_one(OptionList)
        options.highlighted = keys.index(self._current) if self._current in keys else 0
        options.focus()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self._preview(self._entries[event.option_index][0])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._entries[event.option_index][0])

    def action_leave(self) -> None:
        self.dismiss(None)
