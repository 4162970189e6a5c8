"""`northchat --plain`: a conversation line by line, for ssh, screen readers and dumb terminals.

What was printed stays as it is; nothing is drawn over.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from urllib.parse import urlsplit

from northchat import sanitize
from northchat.agent import backend, commands, wording
from northchat.agent.loop import Conversation
from northchat.client import Client, ClientError, Endpoint, Health
from northchat.config import Config
from northchat.lines import AnswerWriter
from northchat.messages import Finish, Reasoning, Sampling, Text
from northchat.terminal import Terminal
from northchat.tui import theme as themes

KEYS = """\
Enter sends; Alt+Enter, Ctrl+J or a \\ before Enter starts a new line.
Ctrl+C stops an answer, Ctrl+D leaves, Up and Down bring earlier questions back."""


def run(config: Config, prompt: str | None = None) -> int:
    """The exit code: 0 left, 1 nobody could answer, 130 interrupted."""
    try:
        terminal = Terminal(config.theme)
        return asyncio.run(_Repl(config, terminal).run(prompt))
    except KeyboardInterrupt:
        print()
        return 130
    except (backend.BackendError, themes.ThemeError) as error:
        print(f"northchat: {sanitize.clean(str(error))}", file=sys.stderr)
        return 1


class _Repl:
    def __init__(self, config: Config, terminal: "Terminal") -> None:
        self._config = config
        self._terminal = terminal
        self._backend = AsyncExitStack()
        self._attachment: backend.Attachment | None = None
        sampling = Sampling(temperature=config.temperature, top_p=config.top_p, seed=config.seed)
        self._conversation = Conversation(Client(Endpoint("http://localhost")), None, sampling, system=config.system)
        self._choices: list[backend.Choice] = []
        self._unsent = ""

    async def run(self, prompt: str | None) -> int:
        self._say("NorthChat, line mode. /help lists commands.")
        try:
            if not await self._connect():
                return 1
            if self._config.base_url is None and self._config.model is None:
                for choice in await backend.find_servers():
                    self._say(f"{choice.where} serves {choice.model} on this machine: /model {choice.model}")
            if prompt:
                self._say(f"> {prompt}")
                await self._ask(prompt)
            async with aclosing(self._questions()) as questions:
                async for text in questions:
                    if not await self._handle(text):
                        break
            return 0
        finally:
            await self._backend.aclose()

    async def _questions(self) -> AsyncGenerator[str]:
        while True:
            unsent, self._unsent = self._unsent, ""
            try:
                text = await self._terminal.read(unsent)
            except KeyboardInterrupt:
                self._say("Ctrl+D or /quit leaves.")
                continue
            if text is None:
                return
            if text.strip():
                yield text

    async def _handle(self, text: str) -> bool:
        """Whether to go on."""
        try:
            command = commands.parse(text)
        except commands.UnknownCommand as error:
            self._say(str(error))
            return True
        if command is None:
            await self._ask(text)
            return True
        name, argument = command[0].name, command[1]
        match name:
            case "quit":
                return False
            case "help":
                for known in commands.COMMANDS:
                    self._say(f"  /{known.name} {known.argument}".ljust(28) + known.summary)
                self._say(KEYS)
            case "clear":
                self._conversation.clear()
                self._say("A new conversation.")
            case "theme":
                self._theme(argument)
            case "model":
                await self._model(argument)
        return True

    # -- who answers -----------------------------------------------------------------------------------------------

    async def _connect(self) -> bool:
        """Whether somebody can answer now. Raises BackendError."""
        await self._backend.aclose()
        self._attachment = None
        client = await backend.connect(self._config)
        self._backend.push_async_callback(client.aclose)
        self._conversation.client = client
        if self._config.base_url is not None:
            return await self._greet(client, self._config.base_url)
        attachment = backend.Attachment(client, _Loading(self._say).show)
        await self._backend.enter_async_context(attachment)
        try:
            health = await attachment.ready()
        except ClientError as error:
            self._say(f"northchat: {error}")
            return False
        self._attachment = attachment
        self._conversation.model = health.model
        self._say(wording.engine(health))
        for line in [*health.notes, *wording.limits(health, demo=health.model == backend.DEFAULT_MODEL)]:
            self._say(line)
        return True

    async def _greet(self, client: Client, url: str) -> bool:
        try:
            model = self._config.model or await client.default_model()
        except ClientError as error:
            self._say(f"northchat: {error}")
            return False
        self._conversation.model = model
        self._say(f"Talking to {model} at {urlsplit(url).netloc}: what you write is sent there.")
        return True

    async def _model(self, wanted: str) -> None:
        if not wanted or not self._choices:
            self._choices = await backend.choices(self._config, self._conversation.client)
        if not wanted:
            for number, choice in enumerate(self._choices, 1):
                current = choice.model == self._conversation.model and choice.base_url == self._config.base_url
                self._say(f"  {number}  {choice.model}, {choice.where}{' (current)' if current else ''}")
            self._say("/model NUMBER, NAME or URL switches.")
            return
        before, self._config = self._config, backend.switch(self._config, wanted, self._choices)
        if not await self._try_connect():
            self._config = before
            if await self._try_connect():
                self._say("Still with the model from before.")

    async def _try_connect(self) -> bool:
        try:
            return await self._connect()
        except backend.BackendError as error:
            self._say(f"northchat: {error}")
            return False

    def _theme(self, name: str) -> None:
        if not name:
            self._say(f"Themes: {', '.join(themes.names())}. /theme NAME switches.")
            return
        try:
            self._terminal.use_theme(name)
        except themes.ThemeError as error:
            self._say(str(error))

    # -- answers ---------------------------------------------------------------------------------------------------

    async def _ask(self, text: str) -> None:
        if self._attachment is not None and self._attachment.lost:
            self._say("The engine has gone; it is started again.")
            if not await self._try_connect():
                self._unsent = text
                return
        before = len(self._conversation.messages)
        task = asyncio.create_task(self._answer(text))
        with _on_interrupt(task.cancel):
            try:
                await task
            except asyncio.CancelledError:
                if not task.cancelled() or (current := asyncio.current_task()) is None or current.cancelling():
                    raise
                self._say("[stopped]")
            except ClientError as error:
                self._say(f"northchat: {error}")
                if len(self._conversation.messages) == before:
                    self._unsent = text

    async def _answer(self, text: str) -> None:
        cleaner = sanitize.Cleaner()
        writer = AnswerWriter(self._terminal.put)
        thinking = False
        try:
            async with aclosing(self._conversation.ask(text)) as events:
                async for event in events:
                    match event:
                        case Text(piece):
                            writer.feed(cleaner.feed(piece))
                        case Reasoning() if not thinking:
                            thinking = True
                            self._say("[thinking]")
                        case Finish():
                            writer.feed(cleaner.flush())
                            writer.end()
                            self._say(f"[{wording.answered(event)}]")
        finally:
            writer.feed(cleaner.flush())
            writer.end()

    def _say(self, line: str) -> None:
        self._terminal.put([(sanitize.clean(line) + "\n", "foreground")])


class _Loading:
    """A line per stage of loading, and one for each quarter of a long one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: tuple[str, int] | None = None

    def show(self, health: Health) -> None:
        if health.status != "loading" or (progress := health.progress) is None:
            return
        stage = (progress.what, 4 * progress.done // max(progress.total, 1))
        if stage != self._said:
            self._said = stage
            self._say(f"{wording.loading(health)} …")


@contextmanager
def _on_interrupt(action: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, action)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
