"""httpx2 over a Unix socket by asyncio's own streams.

The transport that httpx2 brings waits for raw sockets through AnyIO, where a read that is cancelled in the very moment
when data arrives ends in a traceback of the event loop; and to stop an answer is to cancel a read while data arrives.
"""
# ruff: noqa: ASYNC109 -- the signatures are httpcore2's

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

import httpcore2
import httpx2


class UnixTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, path: str) -> None:
        self._pool = httpcore2.AsyncConnectionPool(uds=path, network_backend=_Backend())


class _Backend(httpcore2.AsyncNetworkBackend):
    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                return _Stream(*await asyncio.open_unix_connection(path))
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.ConnectError(error.strerror or str(error)) from error

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Stream(httpcore2.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as error:
            raise httpcore2.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(buffer)
                await self._writer.drain()
        except TimeoutError as error:
            raise httpcore2.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def get_extra_info(self, info: str) -> Any:
        # What the pool asks of an idle connection: whether its other end is closed.
        return self._reader.at_eof() if info == "is_readable" else self._writer.get_extra_info(info)
