import io
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from scripted import Answer, delta, serving_in_thread, sse

from northchat import cli, completion, headless, repl
from northchat.config import Config

HELLO = Answer(sse(delta("hello"), delta(finish="stop")))


@pytest.fixture
def asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, str, str]]:
    """What `-p` would have asked; standard input is empty."""
    calls: list[tuple[Config, str, str]] = []

    def run(config: Config, prompt: str, output_format: Any) -> int:
        calls.append((config, prompt, output_format))
        return 0

    monkeypatch.setattr(headless, "run", run)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    return calls


def python(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "northchat", *arguments], capture_output=True, text=True, timeout=30, **options
    )


def test_version_and_help_import_no_more_than_they_need(home: Path) -> None:
    program = "import sys; from northchat.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    program += "print(sorted({'httpx2', 'msgspec', 'textual', 'prompt_toolkit', 'asyncio'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30).stdout
    assert out.startswith("northchat ")
    assert out.endswith("[]\n")
    shown = python("--help")
    assert shown.returncode == 0
    assert "engine status|stop" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--bogus"], "--bogus"),
        (["--device", "tpu", "-p", "x"], "tpu"),
        (["one", "two"], "two"),
        (["--mod", "x"], "--mod"),
        (["engine"], "command"),
        (["engine", "fly"], "fly"),
        (["completion", "tcsh"], "tcsh"),
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["-p", "x", "y"], "once"),
        (["-p", ""], "empty"),
        (["-p", "-"], "empty"),
        (["--output-format", "json"], "-p TEXT"),
        (["--port", "1", "-p", "x"], "--port belongs to --serve"),
        (["--serve", "-p", "x"], "--serve goes with"),
        (["--serve", "--base-url", "http://x"], "--serve goes with"),
        (["-C", "/nonexistent", "-p", "x"], "/nonexistent: No such file"),
        (["-p", "x", "--base-url", "x:80"], "--base-url: base_url can't be 'x:80'"),
        (["hello"], "no terminal"),
        ([], "no terminal"),
    ],
)
def test_what_cannot_be_carried_out_is_one_line(
    arguments: list[str], part: str, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("northchat: ")
    assert err.count("\n") == 1
    assert part in err
    assert asked == []


def test_flags_reach_the_settings_and_the_front_end(asked: list[tuple[Config, str, str]], tmp_path: Path) -> None:
    before = Path.cwd()
    try:
        arguments = ["-p", "hi", "--model", "m", "--base-url", "http://x/v1", "--output-format", "json"]
        assert cli.main([*arguments, "-C", str(tmp_path)]) == 0
        assert Path.cwd() == tmp_path
    finally:
        os.chdir(before)
    ((config, prompt, output_format),) = asked
    assert (config.model, config.base_url, prompt, output_format) == ("m", "http://x/v1", "hi", "json")


def test_a_bad_config_file_is_one_line(home: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    file = home / "config" / "northchat" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("modle = 'x'\n")
    assert cli.main(["-p", "hi"]) == 2
    assert f"{file}:1: unknown setting 'modle'" in capsys.readouterr().err


def pipe(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes a pipe the standard input; its writing end."""
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdin", open(reading))  # noqa: SIM115
    return writing


@pytest.mark.parametrize(
    ("text", "piped", "question"),
    [
        ("review", b"diff\n\n", "review\n\ndiff"),
        ("review", b"", "review"),
        ("-", b"what?\n", "what?"),
        ("x", b"\xff\xe9", "x\n\n\ufffd\ufffd"),
    ],
)
def test_what_is_piped_in_is_appended(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, text: str, piped: bytes, question: str
) -> None:
    writing = pipe(monkeypatch)
    os.write(writing, piped)
    os.close(writing)
    assert cli.main(["-p", text]) == 0
    assert asked[0][1] == question


def test_a_pipe_that_is_left_open_is_not_waited_for(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "STDIN_PATIENCE_S", 0.05)
    writing = pipe(monkeypatch)
    assert cli.main(["-p", "hi"]) == 0
    os.close(writing)
    assert asked[0][1] == "hi"
    assert "going on without it" in capsys.readouterr().err


def test_a_slow_pipe_is_read_to_its_end(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    writing = pipe(monkeypatch)
    os.write(writing, b"first ")

    def more() -> None:
        os.write(writing, b"second")
        os.close(writing)

    timer = threading.Timer(0.2, more)
    timer.start()
    assert cli.main(["-p", "hi"]) == 0
    timer.join()
    assert asked[0][1] == "hi\n\nfirst second"


def test_a_remote_server_of_the_environment_needs_a_word_from_the_user(
    asked: list[Any], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "https://api.example/v1")
    assert cli.main(["-p", "hi"]) == 2
    assert "pass --base-url" in capsys.readouterr().err
    assert cli.main(["-p", "hi", "--base-url", "https://api.example/v1"]) == 0

    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", Typed("n\n"))
    assert cli.main(["-p", "hi"]) == 2
    monkeypatch.setattr(sys, "stdin", Typed("y\n"))
    assert cli.main(["-p", "hi"]) == 0
    assert "Go on" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Typed(""))
    assert cli.main(["-p", "hi"]) == 0
    assert len(asked) == 3


@pytest.mark.parametrize("how", ["--plain", "TERM", "ACCESSIBLE"])
def test_line_mode(asked: list[Any], monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    started: list[str | None] = []
    monkeypatch.setattr(repl, "run", lambda config, prompt: started.append(prompt) or 0)
    if how != "--plain":
        monkeypatch.setenv(how, "dumb")
    assert cli.main(["hello", *([how] if how == "--plain" else [])]) == 0
    assert started == ["hello"]


def test_a_gpu_that_is_not_there(asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("northchat.agent.backend.GPU", Path("/nonexistent"))
    assert cli.main(["--serve", "--device", "cuda"]) == 1
    assert "no NVIDIA GPU" in capsys.readouterr().err


def test_an_internal_error_is_one_line_and_with_debug_a_traceback(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: Any) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(headless, "run", run)
    assert cli.main(["-p", "x"]) == 1
    err = capsys.readouterr().err
    assert "internal error" in err
    assert err.count("\n") == 1
    assert cli.main(["-p", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_line(
    asked: list[Any], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "state").write_text("a file where a folder should be")
    assert cli.main(["-p", "x", "--debug"]) == 1
    assert capsys.readouterr().err == f"northchat: {home}/state/northchat/log: Not a directory\n"


def test_the_whole_command_with_debug_logs_its_requests(home: Path) -> None:
    with serving_in_thread(lambda request: HELLO) as server:
        done = python("-p", "-", "--base-url", server.url, "--model", "m", "--debug", input="hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    assert server.requests[0].body["messages"][0]["content"] == "hi"
    assert "chat/completions" in (home / "state" / "northchat" / "log" / "front-end.log").read_text()


def test_config_show_tells_origins_and_hides_secrets(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("NORTHCHAT_MODEL", "m")
    assert cli.main(["config", "show", "--origin"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["model"] == ["model", "m", "NORTHCHAT_MODEL"]
    assert rows["api_key"] == ["api_key", "(hidden)", "OPENAI_API_KEY"]
    assert rows["port"] == ["port", "8642", "default"]
    assert cli.main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{home}/config/northchat/config.toml\n"


def test_logs_show_the_end_of_the_newest(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs"]) == 0
    assert "no logs" in capsys.readouterr().err
    folder = home / "state" / "northchat" / "log"
    folder.mkdir(parents=True)
    (folder / "old.log").write_text("old\n")
    os.utime(folder / "old.log", (1, 1))
    (folder / "new.log").write_text("one\ntwo\x1b[2J\nthree\n")
    assert cli.main(["logs", "-n", "2"]) == 0
    assert capsys.readouterr().out == "two\nthree\n"


def test_engine_without_any(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "status"]) == 0
    assert cli.main(["engine", "stop"]) == 0
    assert capsys.readouterr().out == "no engine is running\nno such engine is running\n"


def test_a_reader_of_a_subcommand_that_leaves_is_no_error(home: Path) -> None:
    folder = home / "state" / "northchat" / "log"
    folder.mkdir(parents=True)
    (folder / "new.log").write_text(("x" * 1000 + "\n") * 1000)
    command = f"{sys.executable} -m northchat logs -n 1000 | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert done.stdout == "x" * 10
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_completion_knows_every_subcommand_and_option() -> None:
    assert set(completion.SUBCOMMANDS) == set(cli._subcommands())
    for shell in completion.SHELLS:
        script = completion.script(shell, cli.parser())
        for word in ("output-format", "stream-json", "base-url", "engine", "stop", "pull"):
            assert word in script


def complete(*words: str) -> set[str]:
    program = completion.script("bash", cli.parser())
    program += 'COMP_WORDS=("$@") COMP_CWORD=$(($#-1)); _northchat; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program, "bash", *words], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_in_bash(tmp_path: Path) -> None:
    assert complete("northchat", "en") == {"engine"}
    assert complete("northchat", "engine", "") == {"status", "stop"}
    assert complete("northchat", "--device", "c") == {"cpu", "cuda"}
    assert complete("northchat", "--pl") == {"--plain"}
    (tmp_path / "one.gguf").touch()
    assert complete("northchat", "--model", f"{tmp_path}/o") == {f"{tmp_path}/one.gguf"}
