import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted import Answer, Request, Scripted, delta, json_answer, serving_in_thread, sse

from northchat import headless
from northchat.agent import backend
from northchat.client import Endpoint
from northchat.config import Config
from northchat.messages import Finish, Progress, Text

USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
HELLO = Answer(sse(delta("hel"), delta("lo\x1b[31m"), delta(finish="stop"), USAGE))


@contextmanager
def remote(answer: Answer | Callable[[Request], Answer], model: str = "m") -> Iterator[tuple[Config, Scripted]]:
    with serving_in_thread(answer if callable(answer) else lambda request: answer) as server:
        yield Config(base_url=server.url, model=model, system="be brief", temperature=0.5), server


def run(answer: Answer, output_format: Any = "text") -> int:
    with remote(answer) as (config, _):
        return headless.run(config, "hi", output_format)


def test_text_goes_to_a_pipe_as_the_model_gave_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(HELLO) == 0
    assert capfd.readouterr() == ("hello\x1b[31m\n", "")


def test_settings_reach_the_server() -> None:
    with remote(HELLO) as (config, server):
        headless.run(config, "hi")
    body = server.requests[0].body
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert body["temperature"] == 0.5


def test_json_is_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(HELLO, "json") == 0
    out = json.loads(capfd.readouterr().out)
    assert out["text"] == "hello\x1b[31m"
    assert (out["finish"], out["model"], out["schema_version"]) == ("stop", "m", 1)
    assert out["usage"]["completion_tokens"] == 2
    assert out["stats"]["estimated"] is True


def test_the_model_is_named_when_the_server_chose_it(capfd: pytest.CaptureFixture[str]) -> None:
    def answer(request: Request) -> Answer:
        return json_answer({"data": [{"id": "chosen"}]}) if request.method == "GET" else HELLO

    with serving_in_thread(answer) as server:
        assert headless.run(Config(base_url=server.url), "hi", "json") == 0
    assert json.loads(capfd.readouterr().out)["model"] == "chosen"


def test_stream_json_is_an_event_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(HELLO, "stream-json") == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert lines[0] == {"type": "start", "schema_version": 1, "model": "m"}
    assert [line["text"] for line in lines if line["type"] == "text"] == ["hel", "lo\x1b[31m"]
    assert lines[-1]["type"] == "finish"
    names = {kind.__struct_config__.tag for kind in (Text, Progress, Finish)} | {"start"}
    assert {line["type"] for line in lines} <= names


@pytest.mark.parametrize(
    ("finish", "code"), [("stop", 0), ("length", 3), ("error", 1), ("abort", 1), ("tool_calls", 0)]
)
def test_exit_codes(finish: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Answer(sse(delta("x", finish)))) == code


def test_a_failure_is_one_line_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    refusal = json_answer({"error": {"message": "no \x1b]0;x\x07such model"}}, 404)
    assert run(refusal) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "northchat: no such model. Check --base-url and --model\n"


def test_a_failure_in_json_is_an_object_too(capfd: pytest.CaptureFixture[str]) -> None:
    broken = Answer(sse(delta("hel"), {"error": {"message": "boom", "code": "c"}}, done=False))
    assert run(broken, "json") == 1
    assert json.loads(capfd.readouterr().out) == {
        "schema_version": 1,
        "text": "hel",
        "error": {"message": "boom", "code": "c"},
    }
    assert run(broken, "stream-json") == 1
    last = capfd.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"type": "error", "message": "boom", "code": "c"}


def test_a_broken_answer_keeps_what_came_and_ends_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Answer(sse(delta("hel"), done=False), cut=True)) == 1
    out, err = capfd.readouterr()
    assert out == "hel\n"
    assert "connection" in err


def local(request: Request) -> Answer:
    if request.path == "/northchat/attach":
        states = [{"status": "loading"}, {"status": "ready", "model": "tiny", "can_call_tools": False}]
        return Answer([*sse(*states, done=False), 30.0])
    return HELLO


def test_our_own_engine_is_waited_for_and_asked_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    socket = str(tmp_path / "s")
    with serving_in_thread(local, socket) as server:
        monkeypatch.setattr(backend, "endpoint", lambda config: Endpoint(server.url, socket))
        assert headless.run(Config(model="some/path.gguf"), "hi") == 0
    assert capfd.readouterr().out.startswith("hello")
    assert [request.path for request in server.requests] == ["/northchat/attach", "/v1/chat/completions"]
    assert server.requests[-1].body["model"] == "tiny"


def test_an_engine_that_cannot_load_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    socket = str(tmp_path / "s")
    failed = Answer([*sse({"status": "failed", "message": "the file is damaged"}, done=False), 30.0])
    with serving_in_thread(lambda request: failed, socket) as server:
        monkeypatch.setattr(backend, "endpoint", lambda config: Endpoint(server.url, socket))
        assert headless.run(Config(), "hi") == 1
    assert capfd.readouterr() == ("", "northchat: the file is damaged\n")


def start(config: Config, **streams: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "northchat", "-p", "hi", "--base-url", str(config.base_url), "--model", "m"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **{"stderr": subprocess.PIPE, **streams})


def test_ctrl_c_aborts_the_request_and_exits_130() -> None:
    with remote(Answer([*sse(delta("hel"), done=False), 30.0])) as (config, server):
        process = start(config, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.read(3) == b"hel"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert out == b"\n"
        assert err == b"northchat: interrupted\n"
        assert server.was_cancelled()


def test_a_reader_that_leaves_is_no_error() -> None:
    pieces = [part for _ in range(200) for part in (*sse(delta("x" * 1000), done=False), 0.01)]
    with remote(Answer(pieces)) as (config, _):
        process = start(config, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(10) == 1


def test_a_terminal_is_sent_nothing_that_commands_it(home: Path) -> None:
    hostile = ["safe\x1b]52;c;aGk", "=\x1b\\ and\x1b", "[2J sound\x9b31m\u202e"]
    with remote(Answer(sse(*map(delta, hostile), delta(finish="stop")))) as (config, _):
        ours, theirs = os.openpty()
        process = start(config, stdout=theirs)
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 1000):
                shown += part
        except OSError:  # what Linux says at the end
            pass
        os.close(ours)
        assert process.wait(10) == 0
    assert shown == b"safe and sound\r\n"
