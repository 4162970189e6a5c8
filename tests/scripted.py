"""A scripted OpenAI-compatible server on loopback or a Unix socket: the peer of client and front-end tests."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

Part = bytes | float | asyncio.Event
"""Bytes to send, or seconds to wait, or what to wait for, before the next part."""


def sse(*objects: Any, done: bool = True) -> list[bytes]:
    events = [b"data: " + json.dumps(item).encode() + b"\n\n" for item in objects]
    return [*events, b"data: [DONE]\n\n"] if done else events


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    fields = {"content": content, **more} if content is not None else more
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


@dataclass
class Answer:
    parts: list[Part] = field(default_factory=list)
    status: int = 200
    kind: str = "text/event-stream"
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    """End without the chunked encoding's terminator, as a killed server does."""


def json_answer(value: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(
        [json.dumps(value).encode()], status, "application/json", {k.replace("_", "-"): v for k, v in headers.items()}
    )


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Scripted:
    """`answer` is asked for each request; what was asked and which answers the client cut off is kept."""

    answer: Callable[[Request], Answer]
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def was_cancelled(self, patience: float = 5.0) -> bool:
        """For other threads than the server's."""
        deadline = time.monotonic() + patience
        while not self.cancelled.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.cancelled.is_set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await self._read(reader):
                self.requests.append(request)
                await self._respond(self.answer(request), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Request | None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        method, path, _ = lines[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Request(method, path, headers, json.loads(body) if body else None)

    async def _respond(self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {answer.status} X\r\ncontent-type: {answer.kind}\r\ntransfer-encoding: chunked\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        writer.write(head.encode() + b"\r\n")
        for part in answer.parts:
            if isinstance(part, bytes):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
                continue
            if isinstance(part, asyncio.Event):
                await part.wait()
                continue
            try:
                await asyncio.wait_for(reader.read(1), part)
            except TimeoutError:
                continue
            self.cancelled.set()
            raise ConnectionError
        if answer.cut:
            raise ConnectionError
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def serving(answer: Callable[[Request], Answer], uds: str | None = None) -> AsyncGenerator[Scripted]:
    scripted = Scripted(answer)
    if uds:
        server: asyncio.Server = await asyncio.start_unix_server(scripted._serve, uds)
        scripted.url = "http://northchat"
    else:
        server = await asyncio.start_server(scripted._serve, "127.0.0.1", 0)
        scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()


@contextmanager
def serving_in_thread(answer: Callable[[Request], Answer], uds: str | None = None) -> Iterator[Scripted]:
    """For tests of programs that run an event loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    manager = serving(answer, uds)
    try:
        yield asyncio.run_coroutine_threadsafe(manager.__aenter__(), loop).result(5)
        asyncio.run_coroutine_threadsafe(manager.__aexit__(None, None, None), loop).result(5)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
