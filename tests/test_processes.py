"""`northchat -p` through every process: front end, host, core, and a real model file that is tiny."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from model.model_files import write_gguf

from northchat import launch, rendezvous


@pytest.fixture
def model(home: Path) -> Iterator[Path]:
    settings = home / "config" / "northchat" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("temperature = 0\ndevice = 'cpu'\n")
    yield write_gguf(home / "tiny.gguf")
    for host in launch.list_hosts():
        launch.stop_host(host)


def northchat(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "northchat", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_alone() -> None:
    deadline = time.monotonic() + 20
    # Not launch.list_hosts(), which makes an engine wait for who asked after it.
    while rendezvous.living():
        assert time.monotonic() < deadline, "the engine is still there"
        time.sleep(0.1)


def test_an_answer_comes_from_the_model_and_nothing_stays(model: Path) -> None:
    asking = [northchat("-p", "reverse the text", "--model", str(model), "--output-format", "json") for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in asking]
    assert [process.returncode for process in asking] == [3, 3]
    for answer in answers:
        assert answer["text"]
        assert answer["model"] == "tiny"
        assert answer["finish"] == "length"
        assert answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] == 512
        assert answer["stats"]["context_limit"] == 512
        assert answer["stats"]["tok_s"] > 0
        assert not answer["stats"].get("estimated")
    wait_until_alone()


def test_ctrl_c_in_the_middle_of_an_answer(model: Path) -> None:
    process = northchat("-p", "reverse the text", "--model", str(model))
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err == "northchat: interrupted\n"
    wait_until_alone()


@pytest.mark.parametrize("damage", ["missing", "truncated", "other architecture"])
def test_a_model_that_cannot_be_used_is_one_line(model: Path, damage: str) -> None:
    if damage == "missing":
        model.unlink()
    elif damage == "truncated":
        model.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    else:
        write_gguf(model, architecture="mamba")
    process = northchat("-p", "hi", "--model", str(model))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert re.fullmatch(r"northchat: .*(tiny\.gguf|mamba).*\n", err), err
    assert "Traceback" not in err
    wait_until_alone()
