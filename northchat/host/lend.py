"""POST /northchat/lend (Unix socket only): a TCP endpoint for as long as the connection that asked for it lives."""

import contextlib
import socket
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from northchat.host import transport
from northchat.host.errors import ApiError
from northchat.host.guard import TcpGuard
from northchat.host.listen import HostError, bind_tcp
from northchat.host.server import serving
from northchat.host.state import State, reports


class Address(msgspec.Struct):
    host: str
    port: int
    api_key: str | None = None


async def lend(request: Request) -> Response:
    """Health on every change, from when the endpoint is open; who holds it is a client like one that attached."""
    state: State = request.app.state.host.state
    address = await transport.read_body(request, Address)
    try:
        listener = bind_tcp((address.host, address.port), address.api_key)
    except HostError as error:
        raise ApiError(409, str(error), code="cannot_listen") from error
    name = f"{address.host}:{address.port}"
    state.attach()
    state.update(serving=[*state.health.serving, name])

    def close() -> None:
        listener.close()
        state.update(serving=[other for other in state.health.serving if other != name])
        state.detach()

    guarded = TcpGuard(request.app, address.host, address.api_key)
    return transport.EventStream(_lent(guarded, listener, state), close)


async def _lent(app: ASGIApp, listener: socket.socket, state: State) -> AsyncGenerator[bytes, None]:
    async with serving(app, listener), contextlib.aclosing(reports(state)) as frames:
        async for frame in frames:
            yield frame
