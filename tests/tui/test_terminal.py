"""What really reaches the terminal, read from the other end of a pseudo terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEQUENCE = re.compile(rb"\x1b\[[0-9;?<>=:$]*[ -/]?[@-~]|\x1b\]8;[^\x1b]*\x1b\\|\x1b\]22;[a-z]*\x07")
"""What Textual itself writes: CSI, hyperlinks, the pointer's shape."""
EVIL = (
    "\x1b]52;c;aGVsbG8=\x1b\\ \x1b]0;PWNED\x07 \x1b[2J \x9b31m \u202eabc \x1bP1;2q\x1b\\ [/red] `\x1b[5n` **\x1b[6n**"
)


class Terminal:
    def __init__(self, says: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", PYTHONPATH=f"{HERE.parents[1]}:{HERE}")
            os.execv(sys.executable, [sys.executable, str(HERE / "scripted_app.py"), says])
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.bytes = b""
        self.status: int | None = None

    @property
    def text(self) -> str:
        return SEQUENCE.sub(b"", self.bytes).decode(errors="replace")

    def send(self, keys: str | bytes) -> None:
        os.write(self._fd, keys.encode() if isinstance(keys, str) else keys)

    def read_until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.text[-2_000:]
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    self.bytes += os.read(self._fd, 65536)
                except OSError:  # the other end is closed
                    time.sleep(0.02)

    def sees(self, text: str) -> None:
        self.read_until(lambda: text in self.text)

    def exit_code(self) -> int:
        def ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
            return bool(pid)

        self.read_until(ended)
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[Callable[[str], Terminal]]:
    opened: list[Terminal] = []

    def open_one(says: str) -> Terminal:
        opened.append(Terminal(says))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def assert_restored(written: bytes) -> None:
    """Left the alternate screen; mouse, focus and paste reports off; kitty's keyboard protocol popped; cursor shown."""
    for on, off in [
        (b"\x1b[?1049h", b"\x1b[?1049l"),
        (b"\x1b[?1000h", b"\x1b[?1000l"),
        (b"\x1b[?1003h", b"\x1b[?1003l"),
        (b"\x1b[?1004h", b"\x1b[?1004l"),
        (b"\x1b[?2004h", b"\x1b[?2004l"),
        (b"\x1b[?25l", b"\x1b[?25h"),
        (b"\x1b[>25u", b"\x1b[<u"),
    ]:
        if on in written:
            assert written.rfind(off) > written.rfind(on), off


def test_nothing_that_is_said_commands_the_terminal(terminal: Callable[[str], Terminal]) -> None:
    screen = terminal(EVIL)
    screen.sees("ready")
    screen.send("hello\r")
    screen.sees("the end")
    screen.send("\x14\x04")
    assert screen.exit_code() == 0
    for forbidden in (b"\x1b]52", b"\x1b]0", b"PWNED", b"\x1b[5n", b"\x1b[6n", b"\x1bP", b"\x9b", "\u202e".encode()):
        assert forbidden not in screen.bytes
    rest = SEQUENCE.sub(b"", screen.bytes)
    assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", rest)
    assert "[/red]" in screen.text
    assert_restored(screen.bytes)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_signals_leave_the_terminal_as_it_was(
    terminal: Callable[[str], Terminal], number: signal.Signals, code: int
) -> None:
    screen = terminal("hello")
    screen.sees("ready")
    os.kill(screen.pid, number)
    assert screen.exit_code() == code
    assert_restored(screen.bytes)


def test_after_ctrl_z_and_fg_the_whole_screen_is_there(terminal: Callable[[str], Terminal]) -> None:
    screen = terminal("hello")
    screen.sees("ready")
    screen.send("\x1a")
    screen.read_until(lambda: os.waitpid(screen.pid, os.WNOHANG | os.WUNTRACED)[0])
    assert_restored(screen.bytes)
    screen.bytes = b""
    os.kill(screen.pid, signal.SIGCONT)
    screen.sees("Ask a question.")
    screen.send("\x04")
    assert screen.exit_code() == 0


def test_bytes_that_are_no_utf8_are_pasted_as_replacements(terminal: Callable[[str], Terminal]) -> None:
    screen = terminal("hello")
    screen.sees("ready")
    screen.send(b"\x1b[200~caf\xe9 \xff\x9b \xc3\xa9\x1b[201~")
    screen.sees("caf\ufffd \ufffd\ufffd \xe9")
    screen.send("\x03\x04")
    assert screen.exit_code() == 0
    assert_restored(screen.bytes)


def test_a_fault_of_ours_is_one_line_and_the_terminal_is_restored(
    terminal: Callable[[str], Terminal], home: Path
) -> None:
    screen = terminal("hello")
    screen.sees("ready")
    screen.send("\x0c")
    assert screen.exit_code() == 1
    assert_restored(screen.bytes)
    assert "northchat: a fault in the terminal app (RuntimeError); the details are in" in screen.text
    assert "Traceback" not in screen.text
    assert "RuntimeError: a fault" in (home / "state/northchat/tui.log").read_text()


def test_an_idle_terminal_gets_no_bytes(terminal: Callable[[str], Terminal]) -> None:
    screen = terminal("hello")
    screen.sees("ready")
    quiet = time.monotonic() + 1.0
    screen.read_until(lambda: time.monotonic() > quiet)
    before = len(screen.bytes)
    quiet = time.monotonic() + 1.0
    screen.read_until(lambda: time.monotonic() > quiet)
    assert len(screen.bytes) == before
