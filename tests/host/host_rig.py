"""Hosts with scripted cores, in directories of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from northchat.launch import HostStatus, Launch, list_hosts

HERE = Path(__file__).parent
HOST = HERE / "scripted_host.py"


class Script:
    """What the scripted core does; may be changed between requests."""

    def __init__(self, path: Path, **script: Any) -> None:
        self.path = path
        self.set(**script)

    def set(self, **script: Any) -> None:
        # Cores read it while it is written.
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(script))
        temporary.replace(self.path)

    @property
    def log(self) -> list[str]:
        """What the cores were told: `start PID`, `submit RID MAX_TOKENS "PROMPT"`, `abort RID`."""
        path = self.path.with_suffix(".log")
        return path.read_text().splitlines() if path.exists() else []

    @property
    def core_pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.log if line.startswith("start ")]

    def submits(self) -> list[tuple[int, str]]:
        """max_tokens and prompt of each request."""
        found = [line.split(" ", 3) for line in self.log if line.startswith("submit ")]
        return [(int(limit), json.loads(prompt)) for _, _, limit, prompt in found]


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Waits for a condition to hold, and returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie doesn't."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def leftovers(mark: str) -> list[int]:
    """Processes, ours excepted, that have `mark` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        pid = int(path.parent.name)
        if mark in command and pid != os.getpid() and alive(pid):
            found.append(pid)
    return found


@pytest.fixture(scope="session")
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="nc") as path:
        yield Path(path)


def set_environment(patch: pytest.MonkeyPatch, root: Path) -> None:
    for name in ("RUNTIME_DIR", "STATE_HOME", "DATA_HOME", "CACHE_HOME"):
        (root / name).mkdir(exist_ok=True)
        patch.setenv(f"XDG_{name}", str(root / name))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    patch.delenv("NORTHCHAT_API_KEY", raising=False)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing of other tests' or the user's hosts is seen here; afterwards no process of this test may be left."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="nc") as path:
        set_environment(monkeypatch, Path(path))
        yield Path(path)
        hosts = list_hosts()
        for host in hosts:
            os.kill(host.info.pid, signal.SIGTERM)
        until(lambda: not leftovers(path))


@pytest.fixture
def script(home: Path) -> Script:
    return Script(home / "model.json")


@pytest.fixture
def launch(script: Script) -> Launch:
    return Launch(str(script.path), "cpu", (str(HOST),))


def only_host() -> HostStatus:
    (host,) = list_hosts()
    return host


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Served:
    """A host on TCP, in the foreground."""

    program: tuple[str, ...] = (str(HOST),)

    def __init__(self, script: Script, **environment: str) -> None:
        self.script = script
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, *self.program, "--model", str(script.path), "--serve", f"127.0.0.1:{self.port}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )

    def wait(self) -> "Served":
        import urllib.error
        import urllib.request

        def ready() -> bool:
            assert self.process.poll() is None, self.process.stdout and self.process.stdout.read()
            try:
                with urllib.request.urlopen(f"{self.url}/health") as response:
                    return bool(response.status == 200)
            except urllib.error.URLError:
                return False

        until(ready, 20)
        return self

    def stop(self) -> str:
        """Ctrl-C; what it printed."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=10)
        return output


@pytest.fixture(scope="module")
def served(short_tmp: Path) -> Iterator[Served]:
    """One for all tests of a module; they change its script."""
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, short_tmp)
        served = Served(Script(short_tmp / "served.json")).wait()
        yield served
        served.stop()
        assert not leftovers(str(short_tmp))
