"""What /health and /northchat/attach show, and a way to wait for its changes."""

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec

from northchat import version
from northchat.host import transport

KEEP_ALIVE = 10.0
PAUSE = 0.1
"""Seconds between two reports: what changes meanwhile is in the next."""


class Progress(msgspec.Struct):
    what: str
    done: int
    total: int
    """Bytes; 0 when unknown."""


class Health(msgspec.Struct):
    model: str
    device: str
    status: Literal["loading", "ready", "failed"] = "loading"
    dtype: str = ""
    progress: Progress | None = None
    message: str | None = None
    """Why it failed, or that the engine was restarted: one line for the user."""
    notes: list[str] = []
    max_model_len: int | None = None
    can_call_tools: bool | None = None
    version: str = msgspec.field(default_factory=version.current)
    pid: int = msgspec.field(default_factory=os.getpid)
    core_restarts: int = 0
    running: int = 0
    waiting: int = 0
    clients: int = 0
    serving: list[str] = []
    """host:port of each endpoint that was opened after the start."""


class State:
    def __init__(self, model: str, device: str) -> None:
        self.health = Health(model, device)
        self.attached_ever = False
        self.closed = False
        self._changed = asyncio.Event()

    def update(self, **fields: Any) -> None:
        changed = False
        for name, value in fields.items():
            if getattr(self.health, name) != value:
                setattr(self.health, name, value)
                changed = True
        if changed:
            self.touch()

    def touch(self) -> None:
        """Wakes those who wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """The host leaves: nobody need wait for a change any more."""
        self.closed = True
        self.touch()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change."""
        return self._changed

    def attach(self) -> None:
        """A client is there, until detach()."""
        self.attached_ever = True
        self.update(clients=self.health.clients + 1)

    def detach(self) -> None:
        self.update(clients=self.health.clients - 1)


async def reports(state: State) -> AsyncGenerator[bytes, None]:
    """Health now and on every change, as server-sent events."""
    while not state.closed:
        changed = state.changed
        yield transport.event(state.health)
        await asyncio.sleep(PAUSE)
        while not changed.is_set():
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    await changed.wait()
            except TimeoutError:
                yield transport.KEEP_ALIVE
