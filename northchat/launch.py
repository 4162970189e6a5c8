"""Finds or starts the host of a model. Light: front ends import this before they paint."""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from northchat import paths, rendezvous, version
from northchat.rendezvous import Info, Occupied, Place

if TYPE_CHECKING:
    import subprocess

    from northchat.client import Endpoint

START_TIMEOUT = 30.0
"""Seconds until a host must accept connections; it takes half of one, more on a machine that is very busy."""
STOP_TIMEOUT = 10.0
HTTP_TIMEOUT = 3.0
_LOG_SIZE = 1 << 20


class LaunchError(Exception):
    """No host can be had; one line that names cause and remedy."""


class HostStatus(NamedTuple):
    """A host that lives."""

    info: Info
    place: Place
    health: dict[str, Any]
    """Body of /health; empty when it doesn't answer."""

    @property
    def busy(self) -> bool:
        """Whether somebody would miss it."""
        return self.info.serving is not None or any(self.health.get(key) for key in ("clients", "running", "waiting"))


class Launch(NamedTuple):
    model: str
    device: str
    program: Sequence[str] = ("-m", "northchat.host.main")
    """What Python runs as the host."""

    def ensure(self) -> "Endpoint":
        """The endpoint of a host that accepts connections; its model may still be loading.

        An idle engine of another model or version is replaced. Raises LaunchError when a busy one is in the way, or
        when the host can't start.
        """
        from northchat.client import Endpoint

        try:
            place = rendezvous.place(self.model, self.device)
            endpoint = Endpoint("http://localhost/v1", uds=str(place.socket))
            with rendezvous.launching(self.device, START_TIMEOUT + STOP_TIMEOUT):
                if not self._make_room(place):
                    self._start(place)
            return endpoint
        except Occupied as error:
            raise LaunchError(
                f"another northchat has been starting an engine for too long; end it, then try again ({error})"
            ) from error
        except paths.PathError as error:
            raise LaunchError(str(error)) from error
        except OSError as error:
            raise LaunchError(f"can't start the engine: {error.strerror}: {error.filename}") from error

    def running(self) -> "Endpoint | None":
        """The endpoint of a host that runs already; there is time to attach. Raises LaunchError."""
        from northchat.client import Endpoint

        try:
            place = rendezvous.place(self.model, self.device)
            there = any(_fits(host, place) and _stays(place) for host in list_hosts())
            return Endpoint("http://localhost/v1", uds=str(place.socket)) if there else None
        except paths.PathError as error:
            raise LaunchError(str(error)) from error

    def _make_room(self, place: Place) -> bool:
        """Whether a host that fits is there. Others on the device are stopped. Raises LaunchError for a busy one."""
        for host in list_hosts():
            if host.info.device != self.device:
                continue
            fits = _fits(host, place)
            if fits and _stays(place):
                return True
            if not fits and host.busy and host.health.get("status") != "failed":
                what = f"version {host.info.version}" if host.place == place else host.info.model
                raise LaunchError(
                    f"an engine with {what} is in use on {self.device} (process {host.info.pid}); "
                    "leave the northchat that uses it, or run `northchat engine stop`"
                )
            stop_host(host)
        return False

    def _start(self, place: Place) -> None:
        import subprocess

        log = open_log(place.log)
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", *self.program),
                    *("--model", place.model, "--device", place.device, "--ready-fd", str(writing)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                start_new_session=True,
                cwd="/",
                env=_environment(),
            )
        finally:
            os.close(log)
            os.close(writing)
        try:
            answer = _await_line(reading, time.monotonic() + START_TIMEOUT)
        finally:
            os.close(reading)
            # The process that we started has left a child behind, or failed; either way it ends at once.
            _reap(process)
        if answer != "ready":
            raise LaunchError(f"{answer or 'the engine ended while it started'}; see {place.log}")


def list_hosts() -> list[HostStatus]:
    """The living hosts of this user. Raises PathError."""
    hosts = []
    for info in rendezvous.living():
        place = Place(info.model, info.device)
        hosts.append(HostStatus(info, place, _json(place.socket, "GET", "/health")))
    return hosts


def stop_host(host: HostStatus) -> None:
    """Ends a host and its core, gently first. Raises LaunchError when it can't be ended."""
    with contextlib.suppress(OSError):
        _http(host.place.socket, "POST", "/northchat/stop")
    import signal

    for wanted in (None, signal.SIGTERM, signal.SIGKILL):
        if wanted is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(host.info.pid, wanted)
        with contextlib.suppress(Occupied), rendezvous.lock(host.place.info, STOP_TIMEOUT):
            return
    raise LaunchError(f"the engine with {host.info.model} (process {host.info.pid}) does not end; kill it by hand")


def _fits(host: HostStatus, place: Place) -> bool:
    same = host.place == place and host.info.version == version.current()
    return same and host.health.get("status") in ("loading", "ready")


def _stays(place: Place) -> bool:
    """Announces a client to the host, which may be about to leave."""
    return _json(place.socket, "POST", "/northchat/greet").get("stays") is True


def _json(path: Path, method: str, target: str) -> dict[str, Any]:
    """The object that is answered; empty without one."""
    import json

    try:
        value = json.loads(_http(path, method, target))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _http(path: Path, method: str, target: str) -> bytes:
    """The body of a small response. Raises OSError. Three lines of HTTP/1.0 import faster than any client."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(HTTP_TIMEOUT)
        sock.connect(str(path))
        sock.sendall(f"{method} {target} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    return answer.partition(b"\r\n\r\n")[2]


def _await_line(descriptor: int, deadline: float) -> str:
    """What the host says when it listens or fails: one line; empty when it died without a word."""
    import select

    data = b""
    while not data.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return f"the engine did not listen within {START_TIMEOUT:.0f} s"
        part = os.read(descriptor, 4096)
        if not part:
            break
        data += part
    return data.decode(errors="replace").strip()


def _reap(process: "subprocess.Popen[bytes]") -> None:
    import subprocess

    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def open_log(path: Path) -> int:
    """A descriptor that appends to the log, which starts anew when it has grown large."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_SIZE:
            path.replace(path.with_suffix(".old.log"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _environment() -> dict[str, str]:
    """Ours, with this very package first on the host's path: a source tree need not be installed."""
    root = str(Path(__file__).resolve().parents[1])
    if any(part in ("site-packages", "dist-packages") for part in Path(root).parts):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
