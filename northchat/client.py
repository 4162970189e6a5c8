"""One client for every OpenAI-compatible server: our own host over a Unix socket, or any URL."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from northchat import wire
from northchat.messages import Event, Turn

if TYPE_CHECKING:
    import httpx2

_ATTEMPTS = 4
_LONGEST_WAIT_S = 30.0
_SILENCE_S = 600.0
"""A server that sends nothing for so long, not even a keep-alive, is taken for dead."""
_MAX_EVENT_BYTES = 64 << 20
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class Endpoint:
    """Where a server is. `uds` is the path of a Unix socket; base_url then only gives scheme, name and path."""

    base_url: str
    uds: str | None = None
    api_key: str | None = None


@dataclass(frozen=True)
class ModelInfo:
    id: str
    max_model_len: int | None
    owned_by: str = ""


class LoadProgress(msgspec.Struct):
    what: str
    done: int
    total: int
    """Bytes."""


class Health(msgspec.Struct):
    """What our host says of itself; see GET /health."""

    status: Literal["loading", "ready", "failed"]
    model: str = ""
    device: str = ""
    dtype: str | None = None
    progress: LoadProgress | None = None
    message: str | None = None
    """With status=failed: why, in one line."""
    notes: list[str] = []
    max_model_len: int | None = None
    can_call_tools: bool | None = None
    version: str = ""
    pid: int = 0
    core_restarts: int = 0
    running: int = 0
    waiting: int = 0
    clients: int = 0


class ClientError(Exception):
    """A request failed. `message` is one line that says what happened, `remedy` what to do about it."""

    def __init__(self, message: str, remedy: str = "", *, retryable: bool = False, code: str = "") -> None:
        super().__init__(f"{message}. {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy
        self.retryable = retryable
        self.code = code


class Client:
    """Belongs to the event loop that first uses it. Nothing is imported or connected before the first call."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises ClientError when base_url is no http(s) URL."""
        self.endpoint = endpoint
        parts = urlsplit(endpoint.base_url.strip().rstrip("/").removesuffix("/chat/completions"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(
                f"{endpoint.base_url!r} is no base URL", "It should look like http://127.0.0.1:8000/v1", code="bad_url"
            )
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._base = urlunsplit((parts.scheme, parts.netloc, parts.path or "/v1", parts.query, ""))
        # A path without a version may be a proxy's prefix or all there is; asking once tells.
        self._base_is_sure = not parts.path or re.search(r"/v\d[^/]*(/|$)", parts.path) is not None
        self._plain = parts.scheme == "http"
        self._local = endpoint.uds is not None or parts.hostname in _LOOPBACK
        self._http: httpx2.AsyncClient | None = None
        self._models: list[ModelInfo] | None = None

    async def models(self) -> list[ModelInfo]:
        """Raises ClientError."""
        base = await self._sure_base()
        async with self._request("GET", f"{base}/models") as response:
            self._models = _model_list(await response.aread())
        return self._models

    async def default_model(self) -> str:
        """The server's first. Raises ClientError when it has none."""
        models = self._models or await self.models()
        if not models:
            raise ClientError(
                f"{self._base} serves no model", "Load one there, or name one with --model", code="no_model"
            )
        return models[0].id

    async def stream(self, turn: Turn, model: str | None = None) -> AsyncGenerator[Event]:
        """The events of one answer, Finish last. Closing the iterator cancels the request on the server.

        model=None takes the server's first. A busy or loading server (429, 503) is asked again a few times, never
        after the first byte of an answer. Raises ClientError.
        """
        base = await self._sure_base()
        name = model or await self.default_model()
        limit = next((info.max_model_len for info in self._models or [] if info.id == name), None)
        body = msgspec.json.encode(wire.request_body(turn, name))
        reply = wire.Reply(context_limit=limit)
        ended = False
        async with (
            self._request("POST", f"{base}/chat/completions", body, retry=True) as response,
            aclosing(_data(response)) as events,
        ):
            async for data in events:
                if data == "[DONE]":
                    ended = True
                    break
                chunk = _chunk(data)
                if chunk.error:
                    raise _stream_error(chunk.error)
                for event in reply.feed(chunk):
                    yield event
        if not ended and reply.finished is None:
            raise ClientError("The server ended the answer early", "Ask again", retryable=True, code="cut_off")
        for event in reply.finish():
            yield event

    async def attach(self) -> AsyncGenerator[Health]:
        """Our host's state now and on each change; while this runs, the host counts us as a client.

        Ends when the host leaves. Raises ClientError when it can't be reached or dies.
        """
        async with aclosing(self._reports("GET", "attach")) as states:
            async for health in states:
                yield health

    async def lend(self, host: str, port: int, api_key: str | None) -> AsyncGenerator[Health]:
        """As attach(); while this runs, our host has a TCP endpoint too. Also raises ClientError when it can't."""
        body = msgspec.json.encode({"host": host, "port": port, "api_key": api_key})
        async with aclosing(self._reports("POST", "lend", body)) as states:
            async for health in states:
                yield health

    async def _reports(self, method: str, name: str, body: bytes | None = None) -> AsyncGenerator[Health]:
        async with (
            self._request(method, f"{self._origin}/northchat/{name}", body) as response,
            aclosing(_data(response)) as events,
        ):
            async for data in events:
                yield _health(data)

    async def health(self) -> Health:
        """Raises ClientError when the server can't be reached or isn't ours."""
        async with self._request("GET", f"{self._origin}/health", accept=(503,)) as response:
            return _health(await response.aread())

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def _sure_base(self) -> str:
        if not self._base_is_sure:
            try:
                async with self._request("GET", f"{self._base}/models"):
                    pass
            except ClientError as error:
                if error.code != "404":
                    raise
                self._base += "/v1"
            self._base_is_sure = True
        return self._base

    @asynccontextmanager
    async def _request(
        self, method: str, url: str, body: bytes | None = None, *, retry: bool = False, accept: tuple[int, ...] = ()
    ) -> "AsyncIterator[httpx2.Response]":
        """An open response with status 200 (or one of `accept`); everything else is a ClientError."""
        import httpx2

        http = self._http = self._http or self._connect()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            for attempt in range(1, _ATTEMPTS + 1):
                async with http.stream(method, url, content=body, headers=headers) as response:
                    if response.is_success or response.status_code in accept:
                        yield response
                        return
                    error = _status_error(response.status_code, await response.aread())
                    wait = _retry_after(response.headers.get("retry-after"), attempt)
                if not (retry and error.retryable) or attempt == _ATTEMPTS:
                    raise error
                await asyncio.sleep(wait)
        except httpx2.TimeoutException as error:
            if isinstance(error, httpx2.ConnectTimeout):
                raise self._unreachable("no answer") from error
            raise ClientError(
                f"{self._name()} sent nothing for {_SILENCE_S:.0f} s", "Ask again", retryable=True, code="timeout"
            ) from error
        except (httpx2.ConnectError, httpx2.ProxyError) as error:
            raise self._unreachable(str(error) or "connection refused") from error
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise self._lost(error) from error

    def _connect(self) -> "httpx2.AsyncClient":
        import httpx2

        key = self.endpoint.api_key
        if self.endpoint.uds:
            from northchat.unix_transport import UnixTransport

            transport = UnixTransport(self.endpoint.uds)
        else:
            transport = None
        return httpx2.AsyncClient(
            transport=transport,
            # Without TLS there is no need for the 20-50 ms that reading certificates takes.
            verify=not self._plain,
            # A proxy from the environment is for other machines.
            trust_env=not self._local,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(_SILENCE_S, connect=10.0),
        )

    def _name(self) -> str:
        return "the local engine" if self.endpoint.uds else self._origin

    def _unreachable(self, why: str) -> ClientError:
        remedy = "Try `northchat engine status`" if self.endpoint.uds else "Is the server running? Check --base-url"
        return ClientError(f"Can't reach {self._name()} ({why})", remedy, retryable=True, code="unreachable")

    def _lost(self, error: Exception) -> ClientError:
        if self.endpoint.uds:
            message, remedy = "The local engine went away", "Ask again; `northchat logs` may tell why"
        else:
            message, remedy = f"The connection to {self._origin} broke ({type(error).__name__})", "Ask again"
        return ClientError(message, remedy, retryable=True, code="connection_lost")


async def _data(response: "httpx2.Response") -> AsyncGenerator[str]:
    """The data of each server-sent event; a plain JSON answer comes as one."""
    import httpx2

    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "text/event-stream":
        async for event in httpx2.EventSource(response, max_event_size=_MAX_EVENT_BYTES):
            if event.data:
                yield event.data
    elif kind == "application/json":
        yield (await response.aread()).decode(errors="replace")
        yield "[DONE]"
    else:
        raise ClientError(f"The server answered with {kind or 'no content type'}", "Check --base-url", code="bad_reply")


def _chunk(data: str) -> wire.Chunk:
    try:
        return wire.decode_chunk(data)
    except msgspec.MsgspecError as error:
        raise ClientError(
            f"The server sent what is no chat completion ({error})", "Check --base-url", code="bad_reply"
        ) from error


def _health(data: str | bytes) -> Health:
    try:
        return msgspec.json.decode(data, type=Health)
    except msgspec.MsgspecError as error:
        raise ClientError("The server is no northchat host", "Check --base-url", code="bad_reply") from error


def _model_list(body: bytes) -> list[ModelInfo]:
    try:
        listed = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        listed = None
    if not isinstance(listed, dict):
        raise ClientError("The server's list of models is no JSON object", "Check --base-url", code="bad_reply")
    entries = [entry for entry in listed.get("data") or [] if isinstance(entry, dict) and entry.get("id")]
    return [ModelInfo(str(entry["id"]), _context(entry), str(entry.get("owned_by") or "")) for entry in entries]


def _context(entry: dict[str, Any]) -> int | None:
    meta = entry.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    candidates = (
        entry.get("max_model_len"),
        entry.get("context_length"),
        entry.get("context_window"),
        meta.get("n_ctx"),
        meta.get("n_ctx_train"),
    )
    return next((value for value in candidates if isinstance(value, int) and value > 0), None)


def _retry_after(header: str | None, attempt: int) -> float:
    try:
        wait = float(header or "")
    except ValueError:
        wait = 0.5 * 2 ** (attempt - 1)
    return min(max(wait, 0.0), _LONGEST_WAIT_S)


def _status_error(status: int, body: bytes) -> ClientError:
    try:
        detail = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        detail = body.decode(errors="replace")
    message, code = _explain(detail)
    remedies = {
        401: "Set OPENAI_API_KEY or `api_key` in the configuration",
        403: "Set OPENAI_API_KEY or `api_key` in the configuration",
        404: "Check --base-url and --model",
        429: "Wait a little and ask again",
        503: "Wait a little and ask again",
    }
    remedy = "Start a new conversation with /clear" if code == "context_length_exceeded" else remedies.get(status, "")
    message = message or {404: "Not found", 401: "The server wants an API key"}.get(status, f"HTTP status {status}")
    return ClientError(message, remedy, retryable=status in (429, 503), code=code or str(status))


def _stream_error(error: Any) -> ClientError:
    message, code = _explain({"error": error})
    return ClientError(
        message or "The server failed", retryable=code != "context_length_exceeded", code=code or "error"
    )


def _explain(detail: Any) -> tuple[str, str]:
    """Message (one line) and code of an error body, whichever of the usual shapes it has."""
    code = ""
    if isinstance(detail, dict):
        error = detail.get("error") or detail.get("detail") or detail.get("message") or ""
        if isinstance(error, dict):
            code = error["code"] if isinstance(error.get("code"), str) else ""
            error = error.get("message") or ""
        detail = error
    text = detail if isinstance(detail, str) else msgspec.json.encode(detail).decode()
    if text.lstrip().startswith("<"):
        text = ""
    line = " ".join(text.split()).rstrip(".")
    return (line if len(line) <= 400 else line[:399] + "…"), code
