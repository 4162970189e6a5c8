"""The terminal app: a transcript, a prompt, a line of status, and one answer at a time."""

import asyncio
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import ClassVar

from rich.console import Console, RenderableType
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.driver import Driver
from textual.worker import Worker

from northchat import paths
from northchat.agent import backend, commands, wording
from northchat.client import Client, Endpoint, Health
from northchat.config import Config
from northchat.messages import Stats
from northchat.tui import theme as themes
from northchat.tui.blocks import Failure, Listing, Notice, Thinking, Welcome
from northchat.tui.layout import Palette
from northchat.tui.link import Link, Locate
from northchat.tui.prompt import Choice, History, Prompt
from northchat.tui.status import State, StatusBar
from northchat.tui.talk import NOWHERE, RETRY, Talk
from northchat.tui.thrift import thrifty_driver
from northchat.tui.transcript import Transcript

QUIT_S = 2.0
"""Within so long of the first, a second Ctrl+C leaves."""
KEYS = [
    ("Enter", "send"),
    ("Shift+Enter, Ctrl+J, \\ Enter", "new line"),
    ("↑ ↓", "earlier messages, at the first and last line"),
    ("Esc", "stop the answer; what came so far stays"),
    ("PgUp PgDn, wheel", "scroll; Ctrl+End goes back to the end"),
    ("Ctrl+T", "fold or unfold the last reasoning"),
    ("drag", "select and copy; Ctrl+C copies again"),
    ("Ctrl+C", "clear the prompt; twice leaves"),
    ("Ctrl+D", "leave, on an empty prompt"),
    ("Ctrl+L", "draw the screen anew"),
]


class ChatApp(App[None]):
    CSS = """
    Screen { background: $background; }
    Transcript { height: 1fr; }
    #queue { height: auto; display: none; color: $muted; padding: 0 2; background: $background; }
    Dialog {
        /* At the bottom and see-through, so that a theme's preview can be seen. */
        align: center bottom;
        background: transparent;
        & > Vertical {
            width: 76; max-width: 100%; height: auto; max-height: 100%; margin: 0 0 1 0;
            background: $background; border: round $primary; padding: 0 2;
        }
        & .title { text-style: bold; color: $foreground; margin-bottom: 1; }
        & .text { color: $foreground; }
        & .hint { color: $muted; margin-top: 1; }
        & OptionList, & OptionList:focus {
            height: auto; max-height: 12; border: none; padding: 0; background: $background;
            color: $foreground; text-wrap: nowrap; text-overflow: ellipsis; scrollbar-size-vertical: 1;
            & > .option-list--option-highlighted { background: $panel; color: $primary; text-style: bold; }
        }
    }
    """
    BINDINGS: ClassVar = [
        Binding("escape", "stop", show=False),
        Binding("ctrl+c", "interrupt", show=False),
        Binding("ctrl+l", "repaint", show=False),
        Binding("ctrl+t", "fold", show=False),
        Binding("ctrl+end", "scroll_end", show=False),
        Binding("ctrl+home", "scroll_home", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        config: Config,
        prompt: str | None = None,
        *,
        locate: Locate = backend.endpoint,
        make_client: Callable[[Endpoint], Client] = Client,
    ) -> None:
        """`locate` and `make_client` say how a server is found and spoken to; tests bring scripted ones."""
        self._look = themes.choose(config.theme)
        super().__init__()
        if self.console.color_system == "standard" and not self._look.ansi:
            # Of fine shades, sixteen colours leave nothing that can be read.
            self._look = themes.load("ansi" if self._look.dark else "ansi-light")
        self.register_theme(themes.textual_theme(self._look))
        self.theme = self._look.name
        self._config = config
        self._locate, self._make_client = locate, make_client
        self._palette = Palette(self._look)
        self._transcript = Transcript(self._palette)
        self._status = StatusBar(self._palette, State())
        self._prompt = Prompt(History(paths.state_dir() / "history.jsonl"), self._complete, self._palette)
        self._link = self._new_link()
        self._link_worker: Worker[None] | None = None
        self._greeted = False
        self._restarts = 0
        self._quit_before = 0.0
        self.last_words = ""
        """For the user's shell, once the terminal is its own again."""
        self._choices: list[backend.Choice] = []
        self._talk = Talk(self, self._transcript, self._status, self._link, config)
        if prompt:
            self._talk.send(prompt)

    def get_driver_class(self) -> type[Driver]:
        return thrifty_driver(super().get_driver_class())

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.variables(self._look)

    def compose(self) -> ComposeResult:
        yield self._transcript
        yield self._talk.queue_line
        yield self._prompt
        yield self._status

    # -- life ------------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._leave, 128 + number)
        # After `fg` the terminal shows what the shell left there.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        self._prompt.focus_text()
        self._transcript.add(Welcome())
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """After the first paint: everything that takes time."""
        self.run_worker(self._start(), name="start")

    async def _start(self) -> None:
        if backend.needs_confirmation(self._config):
            await self._ask_about_server()
        self._run_link(self._new_link())
        self.run_worker(_warm_up, thread=True, name="warm-up")
        if self._config.base_url is None and self._config.model is None:
            for choice in await backend.find_servers():
                self._transcript.add(
                    Notice(
                        f"{choice.where} serves {choice.model} on this machine; /model {choice.model} switches to it"
                    )
                )

    async def _ask_about_server(self) -> None:
        from northchat.tui.dialogs import Confirm

        lines = [
            f"OPENAI_BASE_URL names {self._config.base_url}.",
            "What you type will be sent there. This is asked once for each server.",
        ]
        agreed = await self.push_screen_wait(
            Confirm("Talk to this server?", lines, "talk to it", "use the model on this machine")
        )
        if agreed:
            backend.confirm(self._config)
        else:
            self._config = backend.switch(self._config, backend.DEFAULT_MODEL, [_OWN])

    def _leave(self, code: int = 0) -> None:
        health = self._link.health
        if health and not self._link.remote and not health.device.lower().startswith("cpu"):
            self.last_words = f"{health.model} stays loaded for a while; `northchat engine stop` ends it"
        self.exit(return_code=code)

    async def on_unmount(self) -> None:
        await self._link.aclose()

    def _fatal_error(self) -> None:
        """Replaces Textual's: a user gets one line, the log the traceback."""
        self._report(sys.exc_info()[1] or self._exception)

    def panic(self, *renderables: RenderableType) -> None:
        """Replaces Textual's, for faults in its threads of input and output."""
        self._return_code = 1
        shown = Console(file=io.StringIO(), width=120)
        shown.print(*renderables)
        self._report(RuntimeError(shown.file.getvalue()))  # type: ignore[attr-defined]

    def _report(self, error: BaseException | None) -> None:
        log = paths.state_dir() / "tui.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                traceback.print_exception(error, file=file)
            where = f"; the details are in {log}"
        except OSError:
            where = ""
        self.last_words = f"northchat: a fault in the terminal app ({type(error).__name__}){where}"
        self._close_messages_no_wait()

    # -- the one who answers ---------------------------------------------------------------------------------------

    def _new_link(self) -> Link:
        return Link(
            self._config,
            on_health=self._on_health,
            on_lost=self._on_lost,
            on_failure=self._on_failure,
            locate=self._locate,
            client=self._make_client,
        )

    def _run_link(self, link: Link) -> None:
        self._link = self._talk.link = link
        where = {"remote": self._link.remote, "device": "" if self._link.remote else self._config.device or ""}
        self._status.show(
            phase="connecting" if self._link.remote else "starting", model=self._config.model or "", **where
        )
        self._link_worker = self.run_worker(self._link.run(), name="link")

    def _on_health(self, health: Health) -> None:
        if health.core_restarts > self._restarts:
            self._transcript.add(Notice("The engine crashed and was started again.", "warning"))
        self._restarts = health.core_restarts
        demo = health.model == backend.DEFAULT_MODEL
        limits = ("demo, chat only" if demo else "chat only") if health.can_call_tools is False else ""
        self._status.show(model=health.model, device=health.device, limits=limits)
        if health.status == "failed":
            return
        if health.status == "loading":
            self._status.show(phase=wording.loading(health), stats=Stats())
            return
        if not self._talk.answering:
            limit = health.max_model_len
            stats = self._status.state.stats
            self._status.show(phase="ready", stats=stats if stats.context_limit else Stats(context_limit=limit))
        if not self._greeted:
            self._greeted = True
            notes = [*health.notes, *wording.limits(health, demo=demo)]
            if notes:
                self._transcript.add(Notice("\n".join(notes)))
        self._talk.pump()

    def _on_lost(self, why: str) -> None:
        self._transcript.add(Notice(f"{why}; starting it again.", "warning"))
        self._status.show(phase="starting")

    def _on_failure(self, message: str, remedy: str) -> None:
        self._transcript.add(Failure(message, remedy, RETRY))
        self._status.show(phase="failed", detail="")
        self._talk.retry = self._reconnect

    def _reconnect(self) -> None:
        self._transcript.follow = True
        if self._link_worker is not None:
            self._link_worker.cancel()
        self._run_link(self._new_link())

    # -- questions and answers -------------------------------------------------------------------------------------

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        retry, self._talk.retry = self._talk.retry, None
        if not event.text:
            if retry:
                retry()
            return
        try:
            command = commands.parse(event.text)
        except commands.UnknownCommand as error:
            self._transcript.add(Notice(str(error), "warning"))
            return
        if command:
            self._carry_out(command[0].name, command[1])
            return
        self._talk.send(event.text)
        if retry == self._reconnect:
            retry()

    # -- commands --------------------------------------------------------------------------------------------------

    def _complete(self, text: str) -> list[Choice]:
        if text.startswith("/theme "):
            names = [(name, themes.load(name).summary) for name in themes.names()]
            return [Choice(f"/theme {name}", what, True) for name, what in names if name.startswith(text[7:])]
        if text.startswith("/model "):
            known = {choice.model: choice.where for choice in self._choices}
            return [Choice(f"/model {name}", where, True) for name, where in known.items() if name.startswith(text[7:])]
        return [
            Choice(f"/{command.name}", command.summary, True)
            for command in commands.COMMANDS
            if f"/{command.name}".startswith(text)
        ]

    def _carry_out(self, name: str, argument: str) -> None:
        match name:
            case "help":
                self._help()
            case "quit":
                self._leave()
            case "clear":
                self.run_worker(self._clear(), name="clear", group="command", exclusive=True)
            case "theme":
                self.run_worker(self._choose_theme(argument), name="theme", group="command", exclusive=True)
            case "model":
                self.run_worker(self._choose_model(argument), name="model", group="command", exclusive=True)

    def _help(self) -> None:
        self._transcript.follow = True
        entries = [(f"/{each.name} {each.argument}".strip(), each.summary) for each in commands.COMMANDS]
        self._transcript.add(Listing("Commands", entries))
        self._transcript.add(Listing("Keys", KEYS))

    def on_prompt_asked(self) -> None:
        self._help()

    def on_prompt_leave(self) -> None:
        self._leave()

    async def _clear(self) -> None:
        self._stop_answer()
        await self._talk.stopped()
        self._talk.conversation.clear()
        self._transcript.clear()
        self._transcript.add(Welcome())
        health = self._link.health
        self._status.show(stats=Stats(context_limit=health.max_model_len if health else None))

    async def _choose_theme(self, name: str) -> None:
        if not name:
            from northchat.tui.dialogs import Picker

            before = self._look.name
            entries = [(each, each, themes.load(each).summary) for each in themes.names()]
            chosen = await self.push_screen_wait(Picker("Theme", entries, before, self._wear))
            self._wear(chosen or before)
            if chosen is None or chosen == before:
                return
            name = chosen
        try:
            self._wear(name)
        except themes.ThemeError as error:
            self._transcript.add(Notice(str(error), "warning"))
            return
        self._transcript.add(Notice(f'Theme {name}. To keep it: theme = "{name}" in {_config_file()}'))

    def _wear(self, name: str) -> None:
        """Raises ThemeError."""
        self._look = themes.load(name)
        self._palette = Palette(self._look)
        self.register_theme(themes.textual_theme(self._look))
        self.theme = name
        self._transcript.set_palette(self._palette)
        self._prompt.set_palette(self._palette)
        self._status.set_palette(self._palette)

    async def _choose_model(self, wanted: str) -> None:
        client = self._link.client or Client(Endpoint(NOWHERE))
        self._choices = await backend.choices(self._config, client)
        if not wanted:
            from northchat.tui.dialogs import Picker

            entries = [(str(at), choice.model, choice.where) for at, choice in enumerate(self._choices, 1)]
            current = next((key for key, model, _ in entries if model == self._status.state.model), "1")
            wanted = await self.push_screen_wait(Picker("Model", entries, current)) or ""
            if not wanted:
                return
        config = backend.switch(self._config, wanted, self._choices)
        if self._answers(config):
            self._transcript.add(Notice(f"{self._status.state.model} is in use already."))
            return
        self._config = config
        self._stop_answer()
        await self._talk.stopped()
        if self._link_worker is not None:
            self._link_worker.cancel()
        await self._link.aclose()
        self._greeted = False
        self._restarts = 0
        link = self._new_link()
        at = f" at {link.remote}" if link.remote else ""
        self._transcript.add(Notice(f"Switching to {config.model or 'the default model'}{at}."))
        self._run_link(link)

    def _answers(self, config: Config) -> bool:
        """Whether `config` names who answers already; after a failure, to choose the same is to try it again."""
        health = self._link.health
        if health is None or health.status == "failed" or config.base_url != self._config.base_url:
            return False
        return config.model in (self._config.model, health.model)

    # -- keys ------------------------------------------------------------------------------------------------------

    def action_stop(self) -> None:
        if self._prompt.close_completions():
            return
        if self._talk.answering:
            self._stop_answer()
        else:
            self.screen.clear_selection()

    def _stop_answer(self) -> None:
        """What was queued goes back to the prompt: it may no longer be wanted as it is."""
        if unsent := self._talk.stop():
            self._prompt.text = "\n".join(filter(None, [*unsent, self._prompt.text]))

    def action_interrupt(self) -> None:
        selected = self._prompt.selected_text or self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
            self._hint(f"Copied {len(selected):,} characters")
        elif self._prompt.text:
            self._prompt.text = ""
        elif time.monotonic() < self._quit_before:
            self._leave()
        else:
            self._stop_answer()
            self._quit_before = time.monotonic() + QUIT_S
            self._hint("Ctrl+C again leaves")

    def on_text_selected(self) -> None:
        if selected := self.screen.get_selected_text():
            self.copy_to_clipboard(selected)
            self._hint(f"Copied {len(selected):,} characters")

    def _hint(self, text: str) -> None:
        self._status.show(hint=text)
        self.set_timer(QUIT_S, lambda: self._status.show(hint=""))

    def action_repaint(self) -> None:
        self.refresh(layout=True)

    def action_fold(self) -> None:
        thoughts = [block for block in self._transcript.blocks if isinstance(block, Thinking)]
        if thoughts and thoughts[-1].click():
            self._transcript.changed(thoughts[-1])

    def action_scroll_page(self, pages: int) -> None:
        height = max(1, self._transcript.size.height - 2)
        self._transcript.scroll_relative(y=pages * height, animate=False, immediate=True)

    def action_scroll_end(self) -> None:
        self._transcript.scroll_end(animate=False, immediate=True)

    def action_scroll_home(self) -> None:
        self._transcript.scroll_home(animate=False, immediate=True)


_OWN = backend.Choice(backend.DEFAULT_MODEL, None, "this machine")


def run(config: Config, prompt: str | None = None) -> int:
    """Runs the app until the user leaves; the exit code."""
    try:
        app = ChatApp(config, prompt)
    except themes.ThemeError as error:
        print(f"northchat: {error}", file=sys.stderr)
        return 2
    app.run()
    if app.last_words:
        print(app.last_words, file=sys.stderr)
    return app.return_code or 0


def _warm_up() -> None:
    """What the first answer needs, imported while nobody waits for it."""
    from northchat.tui.highlight import Highlighter
    from northchat.tui.inline import inline

    Highlighter("python").line("import this")
    inline("*warm*")


def _config_file() -> str:
    from northchat.config import path

    return str(path()).replace(os.path.expanduser("~"), "~", 1)
