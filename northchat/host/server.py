"""uvicorn on a socket of ours: no signal handlers, no ticking, and on a Unix socket only processes of our own user."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

IDLE_CONNECTION = 75
"""Seconds for which a connection may wait for its next request: longer than most pauses in a conversation."""
GRACEFUL = 1
"""Seconds that open responses get when the server closes."""


class OwnUserProtocol(HttpToolsProtocol):
    """Hangs up on peers of other users; the socket's directory keeps them out already."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (os.getuid(), 0):
                log.warning("hung up on user %d", uid)
                transport.abort()
        super().connection_made(transport)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end = asyncio.Event()

    async def main_loop(self) -> None:
        # The original wakes ten times a second for a Date header that nobody needs.
        await self.on_tick(0)
        await self._end.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        self.should_exit = True
        self._end.set()


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Answers requests on a listening socket inside the block; then closes it and ends what is still open."""
    server = _Server(
        uvicorn.Config(
            app,
            http=OwnUserProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,
            server_header=False,
            timeout_keep_alive=IDLE_CONNECTION,
            timeout_graceful_shutdown=GRACEFUL,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.end()
        await task
