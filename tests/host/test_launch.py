"""Finding, starting, replacing and ending hosts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from host_rig import HOST, Script, alive, leftovers, only_host, until

from northchat import rendezvous
from northchat.launch import Launch, LaunchError, list_hosts, stop_host


def test_importing_it_brings_nothing_heavy() -> None:
    program = "import northchat.launch, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = ("torch", "numpy", "tokenizers", "gguf", "jinja2", "uvicorn", "starlette", "httpx2", "asyncio", "msgspec")
    assert not set(heavy) & set(modules)


def test_launches_at_once_start_one_host(launch: Launch, script: Script) -> None:
    endpoints = []
    threads = [threading.Thread(target=lambda: endpoints.append(launch.ensure())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(endpoints) == 4
    assert len(set(endpoints)) == 1
    host = only_host()
    assert (host.info.model, host.info.device) == (str(script.path), "cpu")
    assert host.health["pid"] == host.info.pid
    # It is nobody's child: no front end that stays is left with a zombie.
    until(lambda: len(script.core_pids) == 1)
    status = Path(f"/proc/{host.info.pid}/status").read_text()
    assert f"PPid:\t{os.getpid()}" not in status


def test_a_host_that_nobody_came_back_to_leaves(launch: Launch, script: Script) -> None:
    import asyncio

    from northchat.client import Client

    async def visit() -> None:
        client = Client(launch.ensure())
        async for health in client.attach():
            if health.status == "ready":
                break
        await client.aclose()

    asyncio.run(visit())
    asyncio.run(visit())  # within the grace, so the same one
    assert len(script.core_pids) == 1
    pid = only_host().info.pid
    until(lambda: not alive(pid))
    assert list_hosts() == []
    assert not leftovers(launch.model)
    assert not rendezvous.place(launch.model, "cpu").socket.exists()


def test_what_a_killed_host_left_is_no_obstacle(launch: Launch) -> None:
    launch.ensure()
    first = only_host()
    os.kill(first.info.pid, signal.SIGKILL)
    until(lambda: not alive(first.info.pid))
    assert first.place.socket.exists()
    # A core that was just being forked holds the lock until it execs.
    until(lambda: list_hosts() == [])
    launch.ensure()
    assert only_host().info.pid != first.info.pid


def test_a_host_that_dies_while_it_starts_is_named_with_its_log(home: Path, script: Script) -> None:
    program = home / "broken.py"
    program.write_text("raise SystemExit('it broke')")
    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        Launch(str(script.path), "cpu", (str(program),)).ensure()
    assert time.monotonic() - started < 10
    log = rendezvous.place(str(script.path), "cpu").log
    assert str(log) in str(caught.value)
    assert "it broke" in log.read_text()


def other(home: Path, launch: Launch) -> Launch:
    script = Script(home / "other.json")
    return Launch(str(script.path), "cpu", launch.program)


def test_an_idle_engine_with_another_model_is_replaced(home: Path, launch: Launch) -> None:
    launch.ensure()
    first = only_host().info.pid
    other(home, launch).ensure()
    assert only_host().info.model == str(home / "other.json")
    assert not alive(first)


def attached(path: Path) -> subprocess.Popen[str]:
    program = f"""
import socket, time
sock = socket.socket(socket.AF_UNIX)
sock.connect({str(path)!r})
sock.sendall(b"GET /northchat/attach HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
while sock.recv(4096):
    print("here", flush=True)
"""
    client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    client.stdout.readline()
    return client


def test_a_busy_engine_is_named(home: Path, launch: Launch) -> None:
    launch.ensure()
    host = only_host()
    client = attached(host.place.socket)
    try:
        with pytest.raises(LaunchError) as caught:
            other(home, launch).ensure()
        assert str(host.info.pid) in str(caught.value)
        assert host.info.model in str(caught.value)
        assert "northchat engine stop" in str(caught.value)
        assert alive(host.info.pid)
        # Another device is another matter.
        Launch(launch.model, "cuda", launch.program).ensure()
        assert len(list_hosts()) == 2
    finally:
        client.kill()
        client.wait()


def test_an_idle_engine_of_another_version_is_replaced(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.ensure()
    first = only_host().info.pid
    monkeypatch.setattr("northchat.version.current", lambda: "99")
    launch.ensure()
    assert only_host().info.pid != first
    assert not alive(first)


def test_stopping(launch: Launch) -> None:
    launch.ensure()
    host = only_host()
    stop_host(host)
    until(lambda: not alive(host.info.pid))
    assert list_hosts() == []


def test_a_host_that_hangs_is_ended_all_the_same(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("northchat.launch.STOP_TIMEOUT", 0.3)
    monkeypatch.setattr("northchat.launch.HTTP_TIMEOUT", 0.3)
    launch.ensure()
    host = only_host()
    os.kill(host.info.pid, signal.SIGSTOP)
    stop_host(host)
    until(lambda: not alive(host.info.pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_host_and_core(launch: Launch, script: Script, number: int) -> None:
    launch.ensure()
    until(lambda: only_host().health["status"] == "ready")
    pid = only_host().info.pid
    os.kill(pid, number)
    until(lambda: not alive(pid))
    assert not any(alive(core) for core in script.core_pids)


def test_a_second_host_for_one_place_is_refused(launch: Launch, script: Script) -> None:
    launch.ensure()
    client = attached(only_host().place.socket)
    try:
        # Straight from the command line, past the launcher's lock.
        done = subprocess.run(
            [sys.executable, str(HOST), "--model", str(script.path), "--serve", "127.0.0.1:0"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 1
        assert "already runs" in done.stderr
        assert done.stderr.count("\n") == 1
    finally:
        client.kill()
        client.wait()


def test_relative_and_absolute_paths_are_one_model(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.path.parent)
    assert rendezvous.place("model.json", "cpu") == rendezvous.place(str(script.path), "cpu")


def test_a_runtime_directory_that_is_too_deep_is_one_line(
    home: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = home / ("d" * 90)
    deep.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(deep))
        with pytest.raises(LaunchError, match="XDG_RUNTIME_DIR"):
            launch.ensure()


def test_a_large_log_starts_anew(launch: Launch) -> None:
    log = rendezvous.place(launch.model, "cpu").log
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x" * (2 << 20))
    launch.ensure()
    assert log.stat().st_size < 1 << 20
    assert log.with_suffix(".old.log").stat().st_size == 2 << 20


def test_info_on_disk(launch: Launch) -> None:
    launch.ensure()
    host = only_host()
    assert json.loads(host.place.info.read_text())["pid"] == host.info.pid
    assert host.place.socket.stat().st_mode & 0o077 == 0
