"""HTTP bodies in, server-sent events out: what the OpenAI routes share."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from northchat.host.errors import ApiError, bad_request

log = logging.getLogger(__name__)

MAX_BODY = 32 << 20
STALLED = 60.0
"""Seconds for which a client may leave a full socket unread before it is dropped."""

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")

_at_path = re.compile(r" - at `\$\.?(.*?)`$")


async def read_body(request: Request, kind: type[T]) -> T:
    """Raises ApiError for a body that is too large, no JSON object, or has a field of a wrong type."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        # A page in a browser can't send this type elsewhere without asking first.
        raise ApiError(415, "The request's Content-Type must be application/json.", code="unsupported_media_type")
    too_large = ApiError(413, f"The request's body is over {MAX_BODY >> 20} MiB.", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise too_large
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        where = _at_path.search(text)
        param = where[1] if where else None
        if param is None:
            text = text if "missing required" in text else "The request's body must be a JSON object."
        raise bad_request(f"Invalid request: {text}", param or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request's body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise bad_request("The request's body is nested too deeply.", code="invalid_json") from error


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def json_response(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


async def gone(receive: Receive) -> None:
    """Returns when the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """The work's result; None, with the work cancelled, when the client leaves first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for other in (task, watch):
            other.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events out of a generator, until it ends, the client leaves, or the client stops reading.

    `close` is called in each case, even when the generator was never started.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        # Headers go at once: a prefill may take minutes, and clients want to see that the request was accepted.
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._frames) as frames:
            async for frame in frames:
                try:
                    async with asyncio.timeout(STALLED):
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
                except TimeoutError:
                    log.warning("dropped a client that read nothing for %.0f s", STALLED)
                    raise ClientStalled from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ClientStalled(Exception):
    """Makes the server close the connection."""
