"""Event streams towards clients that leave, stall, or never come."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from northchat.host import transport


class Source:
    """Frames without end; counts how they are ended."""

    def __init__(self) -> None:
        self.sent = 0
        self.closed = 0

    async def frames(self) -> AsyncGenerator[bytes, None]:
        while True:
            self.sent += 1
            yield b"data: x\n\n"
            await asyncio.sleep(0)

    def close(self) -> None:
        self.closed += 1


SCOPE: dict[str, Any] = {"type": "http"}


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "STALLED", 0.05)
    source = Source()

    async def send(message: Any) -> None:
        if source.sent > 3:
            await asyncio.Event().wait()

    with pytest.raises(transport.ClientStalled):
        await transport.EventStream(source.frames(), source.close)(SCOPE, stays, send)
    assert (source.sent, source.closed) == (4, 1)


async def test_a_client_that_leaves_ends_the_stream() -> None:
    source = Source()
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if source.sent > 3:
            left.set()

    await asyncio.wait_for(transport.EventStream(source.frames(), source.close)(SCOPE, receive, send), 5)
    assert source.closed == 1
    sent = source.sent
    await asyncio.sleep(0.01)
    assert source.sent == sent


async def test_a_stream_that_never_starts_is_closed() -> None:
    source = Source()

    async def send(message: Any) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await transport.EventStream(source.frames(), source.close)(SCOPE, stays, send)
    assert (source.sent, source.closed) == (0, 1)


async def test_work_is_cancelled_when_its_client_leaves() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    assert await transport.unless_gone(receive, work()) is None  # type: ignore[func-returns-value]
    assert cancelled.is_set()
