"""Lines in and out for line mode: editing and colours where a terminal has them, plain text elsewhere."""

import asyncio
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from northchat import paths
from northchat.agent import commands
from northchat.tui import theme as themes

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import Output
    from prompt_toolkit.styles import BaseStyle

_STYLES = {
    "keyword": "keyword",
    "string": "literal.string",
    "number": "literal.number",
    "comment": "comment",
    "function": "name.function",
    "class": "name.class",
    "builtin": "name.builtin",
    "operator": "operator",
    "decorator": "name.decorator",
    "tag": "name.tag",
    "attribute": "name.attribute",
    "inserted": "generic.inserted",
    "deleted": "generic.deleted",
}
"""Syntax role -> the name that prompt_toolkit gives the Pygments token."""


class Terminal:
    """Lines in and out; plain text where there is no terminal or colours aren't wanted."""

    def __init__(self, theme: str) -> None:
        """Raises ThemeError."""
        self._style: BaseStyle | None = None
        self._session: PromptSession[str] | None = None
        self._output: Output | None = None
        self.use_theme(theme)
        self._prompts = sys.stdin.isatty() and sys.stdout.isatty()
        if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("ACCESSIBLE"):
            return
        from prompt_toolkit.output.vt100 import Vt100_Output

        self._output = output = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
        # Nothing depends on where the cursor is, and not every terminal answers when asked.
        output.enable_cpr = False
        if sys.stdin.isatty():
            self._session = _session(output)

    def use_theme(self, name: str) -> None:
        """Raises ThemeError."""
        from prompt_toolkit.styles.pygments import style_from_pygments_cls

        self._style = style_from_pygments_cls(themes.pygments_style(themes.choose(name)))

    async def read(self, unsent: str) -> str | None:
        """What the user typed, None at the end of input. Raises KeyboardInterrupt."""
        if self._session is None:
            if self._prompts:
                self.put([("> ", "foreground")])
            return await _read_line()
        try:
            return await self._session.prompt_async("> ", default=unsent)
        except EOFError:
            return None

    def put(self, pairs: list[tuple[str, str]]) -> None:
        coloured = self._output is not None and any(role in _STYLES for _, role in pairs)
        if not coloured or os.environ.get("NO_COLOR"):
            text = "".join(text for text, _ in pairs)
            sys.stdout.buffer.write(text.encode(sys.stdout.encoding or "utf-8", "replace"))
            sys.stdout.buffer.flush()
            return
        from prompt_toolkit import print_formatted_text
        from prompt_toolkit.formatted_text import FormattedText

        styled = [(f"class:pygments.{_STYLES[role]}" if role in _STYLES else "", text) for text, role in pairs]
        print_formatted_text(FormattedText(styled), output=self._output, style=self._style, end="")


def _session(output: "Output") -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("c-j")
    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History
    try:
        file = paths.state_dir() / "history"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        history = FileHistory(file)
    except OSError:
        history = InMemoryHistory()
    names = [f"/{command.name}" for command in commands.COMMANDS]
    return PromptSession(
        output=output,
        history=history,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        completer=WordCompleter(names, sentence=True),
        complete_while_typing=False,
        reserve_space_for_menu=0,
    )


async def _read_line() -> str | None:
    """The next line of standard input, without its end; None when there is none."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def settle(text: str) -> None:
        if not line.done():
            line.set_result(text)

    def read() -> None:
        text = sys.stdin.readline()
        with contextlib.suppress(RuntimeError):  # we left meanwhile
            loop.call_soon_threadsafe(settle, text)

    # A thread of the loop's own pool would keep the process from ending.
    threading.Thread(target=read, daemon=True).start()
    text = await line
    return text.rstrip("\n") if text else None
