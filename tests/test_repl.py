import asyncio
import io
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted import Answer, Request, delta, json_answer, serving_in_thread, sse

from northchat import repl
from northchat.agent import backend
from northchat.client import Endpoint
from northchat.config import Config

CODE = "Look:\n```python\ndef f():\n    return 1\n```\n"


def echo(request: Request) -> Answer:
    if request.method == "GET":
        return json_answer({"data": [{"id": "m"}, {"id": "other"}]})
    said = [message["content"] for message in request.body["messages"]]
    return Answer(sse(delta(f"{request.body['model']} heard {said[-1]} of {len(said)}"), delta(finish="stop")))


class Slow(io.StringIO):
    def readline(self, size: int = -1, /) -> str:
        time.sleep(0.4)
        return super().readline(size)


def talk(config: Config, typed: str | Slow, monkeypatch: pytest.MonkeyPatch, prompt: str | None = None) -> int:
    monkeypatch.setattr(sys, "stdin", typed if isinstance(typed, Slow) else io.StringIO(typed))
    monkeypatch.setattr(backend, "SERVERS", {})
    return repl.run(config, prompt)


def test_a_conversation_from_a_pipe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with serving_in_thread(echo) as server:
        assert talk(Config(base_url=server.url, model="m"), "one\n\ntwo\n", monkeypatch, "zero") == 0
    out = capfd.readouterr().out
    assert "127.0.0.1" in out
    for line in ("m heard zero of 1\n", "m heard one of 3\n", "m heard two of 5\n"):
        assert line in out
    assert re.search(r"\[first token \d+\.\d\d s\]", out)


def test_commands(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    typed = "/help\n/theme\n/theme nope\n/modle\none\n/clear\ntwo\n/model\n/model other\nthree\n/quit\nnever\n"
    with serving_in_thread(echo) as server:
        assert talk(Config(base_url=server.url, model="m"), typed, monkeypatch) == 0
    out = capfd.readouterr().out
    for part in ("Ctrl+C stops", "Themes: dark, light", "no theme named 'nope'", "did you mean /model", "(current)"):
        assert part in out
    assert "m heard two of 1\n" in out
    assert "other heard three of 3\n" in out
    assert "never" not in out


def test_a_refused_question_is_one_line_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    replies = iter([json_answer({"error": "too \x1b[31mlong"}, 400), None])

    def answer(request: Request) -> Answer:
        return next(replies) or echo(request)

    with serving_in_thread(answer) as server:
        assert talk(Config(base_url=server.url, model="m"), "one\ntwo\n", monkeypatch) == 0
    out = capfd.readouterr().out
    assert "northchat: too long\n" in out
    assert "m heard two of 1\n" in out


def host(*states: dict[str, Any], leaves_after_first_answer: bool = False) -> Any:
    leave = asyncio.Event()

    def answer(request: Request) -> Answer:
        if request.path == "/northchat/attach":
            return Answer([*sse(*states, done=False), leave if leaves_after_first_answer else 30.0])
        leave.set()
        return echo(request)

    return answer


READY = {"status": "ready", "model": "tiny", "device": "CPU, 2 threads", "dtype": "int4", "can_call_tools": False}


def test_our_engine_says_what_it_loads_and_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = [{"status": "loading", "progress": {"what": "downloading", "done": n, "total": 100}} for n in range(100)]
    with serving_in_thread(host(*steps, READY), str(tmp_path / "s")) as server:
        monkeypatch.setattr(backend, "endpoint", lambda config: Endpoint(server.url, str(tmp_path / "s")))
        assert talk(Config(), "one\n", monkeypatch) == 0
    out = capfd.readouterr().out
    assert 2 <= out.count("downloading") <= 5
    assert "tiny · CPU, 2 threads · int4\n" in out
    assert "--base-url" in out
    assert "tiny heard one of 1\n" in out


def test_an_engine_that_left_is_started_again_and_the_conversation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    leaving, staying = str(tmp_path / "1"), str(tmp_path / "2")
    with (
        serving_in_thread(host(READY, leaves_after_first_answer=True), leaving),
        serving_in_thread(host(READY), staying) as second,
    ):
        places = iter([leaving, staying])
        monkeypatch.setattr(backend, "endpoint", lambda config: Endpoint(second.url, next(places)))
        assert talk(Config(), Slow("one\ntwo\n"), monkeypatch) == 0
    out = capfd.readouterr().out
    assert "started again" in out
    assert "tiny heard one of 1\n" in out
    assert "tiny heard two of 3\n" in out


def test_a_server_that_is_not_there_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert talk(Config(base_url="http://127.0.0.1:9"), "one\n", monkeypatch) == 1
    assert "Can't reach http://127.0.0.1:9" in capfd.readouterr().out


def test_nobody_who_could_answer_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def endpoint(config: Config) -> Endpoint:
        raise backend.BackendError("no engine; install one")

    monkeypatch.setattr(backend, "endpoint", endpoint)
    assert talk(Config(), "one\n", monkeypatch) == 1
    assert capfd.readouterr().err == "northchat: no engine; install one\n"


class Terminal:
    """A child on a pseudo-terminal."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self.descriptor = pid, descriptor
        self.shown = b""
        self._seen = 0

    def type(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def wait_for(self, text: bytes, patience: float = 15.0) -> None:
        """Until it is shown after what was waited for before."""
        deadline = time.monotonic() + patience
        while (at := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.descriptor], [], [], 0.1)[0]:
                self.shown += os.read(self.descriptor, 10_000)
        self._seen = at + len(text)

    def leave(self) -> int:
        """Ctrl+D on an empty prompt; the exit code."""
        self.wait_for(b">")
        self.type(b"\x04")
        try:
            while part := os.read(self.descriptor, 10_000):
                self.shown += part
        except OSError:  # what Linux says at the end
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def terminal(url: str, **environment: str) -> Iterator[Terminal]:
    import pty

    command = [sys.executable, "-m", "northchat", "--plain", "--base-url", url, "--model", "m"]
    pid, descriptor = pty.fork()
    if pid == 0:
        os.execve(command[0], command, {"COLORTERM": "", "TERM": "xterm-256color"} | dict(os.environ) | environment)
    try:
        yield Terminal(pid, descriptor)
    finally:
        os.close(descriptor)


def code(request: Request) -> Answer:
    return Answer(sse(delta(CODE), delta(finish="stop")))


@pytest.mark.parametrize(
    ("environment", "plain"),
    [
        ({"TERM": "xterm-256color"}, False),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, True),
        ({"TERM": "dumb"}, True),
    ],
)
def test_code_is_coloured_where_colours_are_wanted(home: Path, environment: dict[str, str], plain: bool) -> None:
    with serving_in_thread(code) as server, terminal(server.url, **environment) as screen:
        screen.wait_for(b">")
        screen.type(b"code\r")
        screen.wait_for(b"[first token")
        assert screen.leave() == 0
    assert (b"def f():\r\n" in screen.shown) is plain
    assert (re.search(rb"\x1b\[[\d;]*38;[\d;]*mdef", screen.shown) is None) is plain
    if environment["TERM"] == "dumb":
        assert b"\x1b" not in screen.shown


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(home: Path) -> None:
    replies = iter([Answer([*sse(delta("begun"), done=False), 30.0])])
    with (
        serving_in_thread(lambda request: next(replies, None) or echo(request)) as server,
        terminal(server.url) as screen,
    ):
        screen.wait_for(b">")
        screen.type(b"one\r")
        screen.wait_for(b"begun")
        screen.type(b"\x03")
        screen.wait_for(b"[stopped]")
        assert server.was_cancelled()
        screen.wait_for(b">")
        screen.type(b"two\\\rlines\r")
        screen.wait_for(b"of 3")
        assert screen.leave() == 0
    messages = server.requests[-1].body["messages"]
    assert [message["content"] for message in messages] == ["one", "begun", "two\nlines"]
    assert "two" in (home / "state" / "northchat" / "history").read_text()
