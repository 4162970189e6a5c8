"""`northchat -p`: one question, one answer on standard output, for scripts and pipes.

Text is printed as the model gives it when standard output is a file or a pipe, and sanitised on a terminal. What is
not the answer (progress, notices, errors) goes to standard error.
"""

import asyncio
import shutil
import sys
from contextlib import AsyncExitStack, aclosing
from typing import Any, Literal, TextIO

import msgspec

from northchat import sanitize
from northchat.agent import backend, wording
from northchat.agent.loop import Conversation
from northchat.client import Client, ClientError, Endpoint, Health
from northchat.config import Config
from northchat.messages import Event, Finish, Sampling, Text

Format = Literal["text", "json", "stream-json"]
SCHEMA_VERSION = 1


def run(config: Config, prompt: str, output_format: Format = "text") -> int:
    """The exit code: 0 answered, 1 failed, 3 cut off at the token limit, 130 interrupted.

    Raises BrokenPipeError when nobody reads standard output any more.
    """
    out = _Out(sys.stdout, output_format)
    try:
        reason = asyncio.run(_answer(config, backend.endpoint(config), prompt, out))
    except KeyboardInterrupt:
        out.interrupted()
        return 130
    except (ClientError, backend.BackendError) as error:
        out.failed(error)
        return 1
    if reason == "length":
        print("northchat: the answer was cut off at the token limit", file=sys.stderr)
    return {"length": 3, "error": 1, "abort": 1}.get(reason, 0)


async def _answer(config: Config, endpoint: Endpoint, prompt: str, out: "_Out") -> str:
    async with AsyncExitStack() as stack:
        client = Client(endpoint)
        stack.push_async_callback(client.aclose)
        if config.base_url is not None:
            model = config.model or await client.default_model()
        else:
            status = _Status(sys.stderr)
            attachment = await stack.enter_async_context(backend.Attachment(client, status.show))
            try:
                health = await attachment.ready()
            finally:
                status.clear()
            model = health.model
            if sys.stderr.isatty():
                for line in wording.limits(health, demo=model == backend.DEFAULT_MODEL):
                    print(line, file=sys.stderr)
        sampling = Sampling(temperature=config.temperature, top_p=config.top_p, seed=config.seed)
        conversation = Conversation(client, model, sampling, system=config.system)
        out.begin(model)
        reason = "stop"
        async with aclosing(conversation.ask(prompt)) as events:
            async for event in events:
                out.event(event)
                if isinstance(event, Finish):
                    reason = event.reason
        return reason


class _Out:
    def __init__(self, stream: TextIO, output_format: Format) -> None:
        self._stream = stream
        self._format = output_format
        self._cleaner = sanitize.Cleaner() if stream.isatty() else None
        self._at_line_start = True
        self._model: str | None = None
        self._text: list[str] = []

    def begin(self, model: str | None) -> None:
        self._model = model
        if self._format == "stream-json":
            self._object({"type": "start", "schema_version": SCHEMA_VERSION, "model": model})

    def event(self, event: Event) -> None:
        if self._format == "stream-json":
            self._object(event)
            return
        match event:
            case Text(text) if self._format == "text":
                self._write(text)
            case Text(text):
                self._text.append(text)
            case Finish() if self._format == "text":
                self._end_line()
            case Finish(reason, usage, stats):
                self._object(
                    {
                        "schema_version": SCHEMA_VERSION,
                        "model": self._model,
                        "text": "".join(self._text),
                        "finish": reason,
                        "usage": usage,
                        "stats": stats,
                    }
                )

    def failed(self, error: Exception) -> None:
        if self._format == "text":
            self._end_line()
        else:
            detail = {"message": str(error), "code": getattr(error, "code", "") or "error"}
            if self._format == "json":
                self._object({"schema_version": SCHEMA_VERSION, "text": "".join(self._text), "error": detail})
            else:
                self._object({"type": "error", **detail})
        print(f"northchat: {sanitize.clean(str(error))}", file=sys.stderr)

    def interrupted(self) -> None:
        if self._format == "text":
            self._end_line()
        print("northchat: interrupted", file=sys.stderr)

    def _object(self, value: Any) -> None:
        self._write(msgspec.json.encode(value).decode() + "\n")

    def _end_line(self) -> None:
        if self._cleaner is not None and (rest := self._cleaner.flush()):
            self._put(rest)
        if not self._at_line_start:
            self._put("\n")

    def _write(self, text: str) -> None:
        if text := self._cleaner.feed(text) if self._cleaner else text:
            self._put(text)

    def _put(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.buffer.write(text.encode(encoding, "replace"))
        self._stream.buffer.flush()
        self._at_line_start = text.endswith("\n")


class _Status:
    """What the engine is loading, on one line that is drawn over; nothing unless a terminal shows it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None
        self._shown = ""

    def show(self, health: Health) -> None:
        line = sanitize.clean(wording.loading(health))
        if self._stream and health.status == "loading" and line != self._shown:
            self._shown = line
            # A line that wraps can't be drawn over.
            self._stream.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            self._stream.flush()

    def clear(self) -> None:
        if self._stream and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = ""
