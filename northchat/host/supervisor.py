"""The core process: started, watched, restarted; requests go to it and outputs come back."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from northchat.engine import protocol
from northchat.host.errors import ApiError
from northchat.host.state import Progress, State

log = logging.getLogger(__name__)

CRASHES_REFUSED = 2
"""A prompt that was in flight in so many crashes is not tried again."""


@dataclass(frozen=True)
class Limits:
    """Seconds, and counts."""

    step: float = 300.0
    """A core with requests that says nothing for so long is killed."""
    load: float = 600.0
    """The same while it loads."""
    stop: float = 2.0
    """How long a core may take to leave when asked."""
    backoff: float = 0.25
    """Before the first restart; doubles with each crash of the last `window`."""
    crashes: int = 4
    """So many crashes within `window`, and it is not restarted any more."""
    window: float = 300.0
    queue: int = 256
    """Requests in flight, running or waiting."""


class Mailbox:
    """Outputs of the requests of one client. A slow reader finds them merged in arrival order, and no more than
    max_tokens ids can gather."""

    def __init__(self) -> None:
        self._outputs: list[protocol.Output] = []
        self._error: ApiError | None = None
        self._filled = asyncio.Event()

    def put(self, output: protocol.Output) -> None:
        self._outputs.append(output)
        self._filled.set()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._filled.set()

    async def take(self, patience: float) -> list[protocol.Output]:
        """All that has come; nothing after `patience` seconds of silence. Raises ApiError when the core was lost."""
        try:
            async with asyncio.timeout(patience):
                await self._filled.wait()
        except TimeoutError:
            return []
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            if self._error is None:
                self._filled.clear()
            return outputs
        assert self._error is not None
        raise self._error


@dataclass
class _InFlight:
    fingerprint: int
    mailbox: Mailbox


class Supervisor:
    def __init__(self, state: State, limits: Limits | None = None) -> None:
        self._state = state
        self._limits = limits or Limits()
        self._writer: asyncio.StreamWriter | None = None
        self._ready = False
        self._open = False
        self._last_rid = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._suspects: Counter[int] = Counter()
        self._heard = 0.0
        self.vocab_size = 0

    # Requests

    def submit(self, mailbox: Mailbox, request: protocol.Submit) -> int:
        """Sends a request under a new rid, which is returned; its outputs go to `mailbox`.

        Raises ApiError when the core isn't ready, has too many requests, or crashed twice under this prompt.
        """
        if not self._ready or self._writer is None:
            raise self.unavailable()
        if len(self._in_flight) >= self._limits.queue:
            message = "The engine has too many requests waiting; try again later."
            raise ApiError(503, message, code="server_overloaded", retry_after=5)
        fingerprint = hash(tuple(request.prompt))
        if self._suspects[fingerprint] >= CRASHES_REFUSED:
            raise ApiError(
                500,
                f"This request was in flight in {CRASHES_REFUSED} crashes of the engine and is not tried again. "
                "Change it, or restart the engine with `northchat engine stop`.",
                code="request_crashed_engine",
                retry=False,
            )
        if not self._in_flight:
            self._heard = time.monotonic()
        self._last_rid += 1
        request.rid = self._last_rid
        self._in_flight[request.rid] = _InFlight(fingerprint, mailbox)
        self._writer.write(protocol.encode(request))
        self._state.touch()
        return request.rid

    def abort(self, rid: int) -> None:
        """Ends a request whose outputs nobody wants any more; one that is over already is no error."""
        if self._in_flight.pop(rid, None) is not None and self._writer is not None:
            self._writer.write(protocol.encode(protocol.Abort(rid)))
            if not self._in_flight:
                self._counts()

    def open(self) -> None:
        """The host is ready too: the engine is reported as ready from when its core is."""
        self._open = True
        if self._ready:
            self._state.update(status="ready")

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    def unavailable(self) -> ApiError:
        health = self._state.health
        if health.status == "failed":
            return ApiError(500, health.message or "The engine failed.", code="engine_failed", retry=False)
        what = f" ({health.progress.what})" if health.progress else ""
        # After a crash its files are in memory still.
        seconds = 1 if health.core_restarts else 2
        message = f"The model is loading{what}; try again shortly."
        return ApiError(503, message, code="model_loading", retry_after=seconds, retry=True)

    # Life

    async def run(self, command: Sequence[str]) -> None:
        """Keeps a core alive, which gets `--fd N` behind `command`, until it can't start or keeps crashing.

        Cancel it to end the core.
        """
        crashes: deque[float] = deque()
        while True:
            message, fatal = await self._life(command)
            now = time.monotonic()
            crashes.append(now)
            while now - crashes[0] > self._limits.window:
                crashes.popleft()
            if not fatal and len(crashes) >= self._limits.crashes:
                message = f"{message} It crashed {len(crashes)} times and is not restarted; `northchat logs` shows why."
                fatal = True
            log.error("%s", message)
            if fatal:
                self._state.update(status="failed", progress=None, message=message)
                return
            self._state.update(
                status="loading",
                progress=None,
                message=f"{message} It is being restarted.",
                core_restarts=self._state.health.core_restarts + 1,
            )
            await asyncio.sleep(self._limits.backoff * 2 ** (len(crashes) - 1))

    async def _life(self, command: Sequence[str]) -> tuple[str, bool]:
        """One core from start to end: why it ended, and whether another would end the same way."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220
                [*command, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # A hang is killed with SIGABRT, which then leaves the stacks of its threads in the log.
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )
        log.info("core %d started", process.pid)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        cause: str | None = None
        fatal = False
        try:
            cause = await self._listen(reader)
            fatal = cause is not None
        except (protocol.ProtocolError, ConnectionError) as error:
            cause = f"The engine sent what can't be understood: {error}."
            process.kill()
        except _Silent as error:
            cause = f"The engine said nothing for {error.seconds:.0f} s and was killed."
            process.send_signal(signal.SIGABRT)
        except asyncio.CancelledError:
            cause, fatal = "The engine is shutting down.", True
            if self._ready:
                self._writer.write(protocol.encode(protocol.Shutdown()))
            else:  # it listens to nothing while it loads, and has nothing to lose
                process.kill()
            raise
        finally:
            # Nobody may submit to a core that is going.
            self._ready = False
            writer, self._writer = self._writer, None
            code = await asyncio.shield(self._reap(process))
            writer.close()
            message = cause or _death(code)
            self._lose(message, fatal)
        return message, fatal

    async def _listen(self, reader: asyncio.StreamReader) -> str | None:
        """Handles frames until EOF; returns the line of a core that says that it can't start."""
        frames = protocol.FrameBuffer(protocol.FromCore)
        self._heard = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(self._patience()):
                    data = await reader.read(1 << 18)
            except TimeoutError:
                # The clock runs only while the core owes us something.
                limit = self._limits.step if self._ready else self._limits.load
                if (self._in_flight or not self._ready) and time.monotonic() - self._heard >= limit:
                    raise _Silent(limit) from None
                continue
            if not data:
                return None
            self._heard = time.monotonic()
            for frame in frames.feed(data):
                if isinstance(frame, protocol.Failed):
                    return frame.message
                self._handle(frame)

    def _patience(self) -> float:
        limit = self._limits.step if self._ready else self._limits.load
        if self._in_flight or not self._ready:
            return max(0.01, self._heard + limit - time.monotonic())
        return limit

    def _handle(self, frame: object) -> None:
        match frame:
            case protocol.Step():
                for output in frame.outputs:
                    if (request := self._in_flight.get(output.rid)) is None:
                        continue
                    if output.finish is not None:
                        del self._in_flight[output.rid]
                    request.mailbox.put(output)
                self._counts(frame.running, frame.waiting)
            case protocol.Loading():
                self._state.update(progress=Progress(frame.what, frame.done, frame.total))
            case protocol.Ready():
                if frame.version != protocol.VERSION:
                    raise protocol.ProtocolError(f"version {frame.version} instead of {protocol.VERSION}")
                self._ready = True
                self.vocab_size = frame.vocab_size
                self._state.update(
                    status="ready" if self._open else "loading",
                    device=frame.device,
                    dtype=frame.dtype,
                    max_model_len=frame.max_model_len,
                    notes=frame.notes,
                    progress=None,
                    message=None,
                )
            case _:
                raise protocol.ProtocolError(f"unexpected {type(frame).__name__}")

    def _counts(self, running: int = 0, waiting: int = 0) -> None:
        if not self._in_flight:
            running = waiting = 0
        self._state.update(running=running, waiting=waiting)
        if not self._in_flight:
            self._state.touch()

    def _lose(self, message: str, fatal: bool) -> None:
        """Tells those who wait that their request is gone."""
        retry = "" if fatal else " Send the request again."
        error = ApiError(503, message + retry, code="engine_restarted", retry_after=1, retry=not fatal)
        for request in self._in_flight.values():
            self._suspects[request.fingerprint] += 1
            request.mailbox.fail(error)
        self._in_flight.clear()
        self._counts()

    async def _reap(self, process: subprocess.Popen[bytes]) -> int:
        deadline = time.monotonic() + self._limits.stop
        while (code := process.poll()) is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(0.01)
        log.info("core %d ended with %d", process.pid, code)
        return code


class _Silent(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


def _death(code: int) -> str:
    if code == -signal.SIGKILL:
        return "The engine was killed (SIGKILL; by hand, or by the system for want of memory)."
    if code < 0:
        return f"The engine crashed ({signal.Signals(-code).name})."
    return f"The engine ended unexpectedly (exit code {code})."
