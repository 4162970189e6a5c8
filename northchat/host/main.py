"""The host process: its life from the first client to the last, and what it is made of."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from northchat import paths, rendezvous, version
from northchat.host.listen import HostError, bind_tcp, bind_unix

if TYPE_CHECKING:
    from northchat.chat.stream import ChatFormat, Tokenizer
    from northchat.host.turns import Turns
    from northchat.model.catalog import Model, ModelFiles

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE = 1.5
"""Seconds between the last client's leaving and the next one's coming, on a device where nothing is worth keeping."""
UNATTENDED = 30.0
"""The same when nobody has attached yet."""
CUDA_KEEP_ALIVE = 600.0
PREDECESSOR = 5.0
"""Seconds that a host of the same model, just leaving, may take to be gone."""
NO_TEMPLATE = "{{ raise_exception('this model has no chat template; only /v1/completions works with it') }}"


@dataclass(frozen=True)
class Settings:
    model: str
    device: str = "cpu"
    dtype: str = "auto"
    serve: tuple[str, int] | None = None
    """Address of the TCP endpoint; such a host stays until it is stopped."""
    api_key: str | None = None
    keep_alive: float | None = None
    """Seconds without clients; None: by device."""


@dataclass(frozen=True)
class Parts:
    """Where a host takes from what it doesn't make itself."""

    resolve: Callable[[str], "Model"]
    load_tokenizer: Callable[[Path], "Tokenizer"]
    core: Sequence[str]
    """The command of a core, up to its --model."""


def default_parts() -> Parts:
    from northchat.model import catalog
    from northchat.model.tokenizer import Tokenizer

    return Parts(catalog.resolve, Tokenizer, (sys.executable, "-P", "-m", "northchat.engine.core"))


class Host:
    """Made inside a running event loop."""

    def __init__(self, settings: Settings, parts: Callable[[], Parts]) -> None:
        from northchat.host.state import State
        from northchat.host.supervisor import Supervisor

        self.state = State(settings.model, settings.device)
        self.created = int(time.time())
        self._settings = settings
        self._parts = parts
        self._supervisor = Supervisor(self.state)
        self._turns: Turns | None = None
        self._stopping = asyncio.Event()
        self._last_sign = time.monotonic()

    def turns(self) -> "Turns":
        """Raises ApiError while the model isn't ready."""
        if self._turns is None or self.state.health.status != "ready":
            raise self._supervisor.unavailable()
        return self._turns

    def stop(self) -> None:
        self._stopping.set()

    def greet(self) -> bool:
        """Whether there is time to attach for somebody who is about to."""
        self._last_sign = time.monotonic()
        return not self._stopping.is_set()

    async def run(self, sockets: "Sequence[tuple[socket.socket, bool]]", ready: Callable[[], None]) -> bool:
        """Serves on listening sockets, of which each is local (Unix) or not, until stopped or left alone.

        Calls `ready` when requests are answered. Returns whether the model could be served.
        """
        async with contextlib.AsyncExitStack() as stack:
            for listener, local in sockets:
                await stack.enter_async_context(self._serving(listener, local))
            ready()
            life = asyncio.create_task(self._live())
            ends = [life, *(asyncio.create_task(wait) for wait in (self._stopping.wait(), self._left_alone()))]
            if self._settings.serve is None:
                # A host that failed waits for its clients to hear of it.
                ends.remove(life)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            for task in {life, *ends}:
                task.cancel()
            await asyncio.gather(life, *ends, return_exceptions=True)
            self.state.close()
        return self.state.health.status != "failed"

    @contextlib.asynccontextmanager
    async def _serving(self, listener: socket.socket, local: bool) -> AsyncIterator[None]:
        from northchat.host.app import make_app
        from northchat.host.guard import TcpGuard
        from northchat.host.server import serving

        app = make_app(self)
        address = self._settings.serve
        guarded = app if local or address is None else TcpGuard(app, address[0], self._settings.api_key)
        async with serving(guarded, listener):
            yield

    async def _live(self) -> None:
        """Loads the model and keeps a core on it. Returns when that has failed for good."""
        from northchat.chat.stream import TurnError
        from northchat.host.turns import Turns
        from northchat.model.weights import ModelError

        loop = asyncio.get_running_loop()

        def progress(what: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(self._progress, what, done, total)

        try:
            parts = await asyncio.to_thread(self._parts)
            model = await in_background(lambda: parts.resolve(self._settings.model))
            self.state.update(model=model.name, can_call_tools=model.can_call_tools)
            files = await in_background(lambda: model.fetch(progress))
            options = ["--model", str(files.path), "--device", self._settings.device, "--dtype", self._settings.dtype]
            options += ["--tokenizer", str(files.tokenizer_json)]
            core = asyncio.create_task(self._supervisor.run([*parts.core, *options]))
            try:
                tokenizer = await asyncio.to_thread(parts.load_tokenizer, files.tokenizer_json)
                chat = make_format(model, files, tokenizer)
                self._turns = Turns(tokenizer, chat, eos_ids(files.config), self._supervisor, self.state)
                self._supervisor.open()
                await core
            finally:
                core.cancel()
                await asyncio.gather(core, return_exceptions=True)
        except (ModelError, TurnError) as error:
            self._fail(str(error))
        except Exception:
            log.exception("loading failed")
            self._fail("The model can't be loaded; `northchat logs` shows why.")

    def _progress(self, what: str, done: int, total: int) -> None:
        from northchat.host.state import Progress

        self.state.update(progress=Progress(what, done, total))

    def _fail(self, message: str) -> None:
        log.error("%s", message)
        self.state.update(status="failed", progress=None, message=message)

    async def _left_alone(self) -> None:
        """Returns when there has been no client for as long as we wait for one."""
        keep_alive = self._settings.keep_alive
        if keep_alive is None:
            keep_alive = CUDA_KEEP_ALIVE if self._settings.device.startswith("cuda") else 0.0
        alone_since = time.monotonic()
        while True:
            changed = self.state.changed
            busy = self.state.health.clients > 0 or self._supervisor.busy
            if busy or self._settings.serve is not None:
                await changed.wait()
                alone_since = time.monotonic()
                continue
            patience = max(GRACE, keep_alive) if self.state.attached_ever else max(UNATTENDED, keep_alive)
            if self.state.health.status == "failed" and self.state.attached_ever:
                patience = GRACE
            left = max(alone_since + patience, self._last_sign + GRACE) - time.monotonic()
            if left <= 0:
                # Who greets us from now on is told that we leave.
                self.stop()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await changed.wait()


async def in_background(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but the process can end meanwhile: a download isn't waited for."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(cast(T, value))
        else:
            result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await result


def make_format(model: "Model", files: "ModelFiles", tokenizer: "Tokenizer") -> "ChatFormat":
    """Raises TurnError when the model's files don't go with its format."""
    from northchat.chat.chatml import ChatML, own_system
    from northchat.chat.stream import TurnError
    from northchat.chat.template import TemplateFormat

    match model.format:
        case "chatml":
            system = None if files.chat_template is None else own_system(files.chat_template)
            return ChatML(tokenizer, model.defaults, system)
        case "template":
            return TemplateFormat(
                tokenizer,
                files.chat_template or NO_TEMPLATE,
                model.defaults,
                bos=files.config.get("bos_token_id"),
                eos=eos_ids(files.config),
                tools=model.can_call_tools,
            )
        case "north":
            from northchat.chat.north import North

            return North(tokenizer, model.defaults, files.chat_template)
        case _:
            raise TurnError(f"there is no chat format `{model.format}`")


def eos_ids(config: dict[str, Any]) -> list[int]:
    """The ids of a config that end a text: one, several, or none."""
    eos = config.get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])


# Start


@contextlib.contextmanager
def claim(settings: Settings) -> Iterator[socket.socket]:
    """The Unix socket of the model and device, ours until the end. Raises HostError when another host has it."""
    place = rendezvous.place(settings.model, settings.device)
    try:
        # A predecessor that is just leaving may still hold its model in memory.
        with rendezvous.lock(place.info, PREDECESSOR) as descriptor:
            serving = None if settings.serve is None else "{}:{}".format(*settings.serve)
            info = rendezvous.Info(os.getpid(), place.model, place.device, version.current(), serving)
            rendezvous.write_info(descriptor, info)
            listener = bind_unix(place.socket)
            try:
                yield listener
            finally:
                listener.close()
                # The info file stays: who waits for its lock would otherwise get one on a file that is gone.
                place.socket.unlink(missing_ok=True)
    except rendezvous.Occupied as error:
        raise HostError(
            f"{settings.model} already runs on {settings.device}; use that, or end it with `northchat engine stop`"
        ) from error
    except paths.PathError as error:
        raise HostError(str(error)) from error


def run_host(settings: Settings, parts: Callable[[], Parts], ready: Callable[[], None]) -> int:
    """Runs a host to its end; the process's exit code. Raises HostError when it can't start."""
    with contextlib.ExitStack() as stack:
        sockets = []
        if settings.serve is not None:
            sockets.append((bind_tcp(settings.serve, settings.api_key), False))
        try:
            sockets.append((stack.enter_context(claim(settings)), True))
        except OSError as error:
            raise HostError(f"can't use {error.filename or paths.runtime_dir()}: {error.strerror}") from error

        async def main() -> bool:
            host = Host(settings, parts)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, host.stop)
            served = await host.run(sockets, ready)
            if not served and settings.serve is not None:
                print(f"northchat: {host.state.health.message}", file=sys.stderr)
            return served

        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            served = runner.run(main())
    return 0 if served else 1


def serve(settings: Settings, parts: Callable[[], Parts] = default_parts) -> int:
    """`northchat --serve`: in the foreground, until Ctrl-C; the process's exit code."""
    assert settings.serve is not None
    logging.basicConfig(level=logging.WARNING, format="northchat: %(message)s")

    def ready() -> None:
        host, port = settings.serve or ("", 0)
        print(f"Serving {settings.model} on http://{host}:{port}/v1 (Ctrl-C ends it)", file=sys.stderr)

    try:
        return run_host(settings, parts, ready)
    except HostError as error:
        print(f"northchat: {error}", file=sys.stderr)
        return 1


def detach() -> None:
    """Becomes a process that the launcher needn't reap. Call it before there are threads."""
    if os.fork():
        os._exit(0)


def background(settings: Settings, parts: Callable[[], Parts], ready_fd: int) -> int:
    """The host behind launch.py, which reads one line from `ready_fd`."""

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(ready_fd, line.encode() + b"\n")
        with contextlib.suppress(OSError):
            os.close(ready_fd)

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.info("host %d of %s on %s, version %s", os.getpid(), settings.model, settings.device, version.current())
    try:
        return run_host(settings, parts, lambda: tell("ready"))
    except HostError as error:
        tell(str(error))
        return 1
    finally:
        log.info("host %d ends", os.getpid())


def main(arguments: Sequence[str] | None = None, parts: Callable[[], Parts] = default_parts) -> int:
    parser = argparse.ArgumentParser(prog="python -m northchat.host.main", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--serve", metavar="HOST:PORT", type=_address)
    parser.add_argument("--keep-alive", type=float, metavar="SECONDS")
    parser.add_argument("--ready-fd", type=int, help="detach, and write a line there when listening")
    options = parser.parse_args(arguments)
    if options.ready_fd is not None:
        detach()
    settings = Settings(
        options.model,
        options.device,
        options.dtype,
        options.serve,
        # Not an option: others on the machine can read a command line.
        os.environ.get("NORTHCHAT_API_KEY") or None,
        options.keep_alive,
    )
    if options.serve is not None:
        return serve(settings, parts)
    return background(settings, parts, os.dup(2) if options.ready_fd is None else options.ready_fd)


def _address(value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{value!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


if __name__ == "__main__":
    sys.exit(main())
