"""`northchat --serve` while an engine runs already."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx2
import pytest
from host_rig import Script, alive, free_port, only_host, until
from openai import OpenAI

from northchat.launch import Launch, list_hosts


class Lent:
    """`northchat --serve` on a port."""

    def __init__(self, script: Script, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "northchat", "--serve", "--model", str(script.path)),
                *("--port", str(self.port), *options),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def is_open(self) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def lent(launch: Launch, script: Script) -> Iterator[Lent]:
    launch.ensure()
    lent = Lent(script)
    assert f"Serving {script.path} on {lent.url}/v1" in lent.line()
    yield lent
    lent.process.kill()
    lent.process.wait()


def test_the_engine_that_runs_serves_until_ctrl_c(lent: Lent, script: Script) -> None:
    until(lambda: only_host().health["status"] == "ready")
    client = OpenAI(base_url=f"{lent.url}/v1", api_key="none")
    assert client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x"}]).choices
    assert len(script.core_pids) == 1
    host = only_host()
    assert (host.health["clients"], host.health["serving"]) == (1, [f"127.0.0.1:{lent.port}"])
    # What is for our own user only stays so.
    assert httpx2.post(f"{lent.url}/northchat/lend", json={"host": "127.0.0.1", "port": 0}).status_code == 404
    lent.process.send_signal(signal.SIGINT)
    assert lent.process.wait(timeout=10) == 0
    until(lambda: not lent.is_open())
    # Nobody else was there: the engine leaves.
    until(lambda: not alive(host.info.pid))


def test_a_killed_one_takes_its_endpoint_with_it(lent: Lent) -> None:
    assert lent.is_open()
    lent.process.kill()
    until(lambda: not lent.is_open())
    until(lambda: only_host().health["serving"] == [])


def test_an_engine_that_is_stopped_ends_it(lent: Lent) -> None:
    subprocess.run([sys.executable, "-m", "northchat", "engine", "stop"], check=True, capture_output=True)
    assert lent.process.wait(timeout=10) == 0
    assert "stopped" in lent.line()


def test_it_takes_the_place_of_an_engine_that_died(lent: Lent) -> None:
    os.kill(only_host().info.pid, signal.SIGKILL)
    # It serves by itself then; that the script is no real model is the first thing it finds.
    assert lent.process.wait(timeout=20) == 1
    assert "Serving" in lent.line()
    assert "already runs" not in lent.line()


def test_a_key_and_a_port_that_is_taken(lent: Lent, script: Script) -> None:
    second = Lent(script, "--api-key", "secret")
    try:
        assert "Serving" in second.line()
        assert httpx2.get(f"{second.url}/v1/models").status_code == 401
        assert httpx2.get(f"{second.url}/v1/models", headers={"x-api-key": "secret"}).status_code == 200
        assert httpx2.get(f"{lent.url}/v1/models").status_code == 200
        third = Lent(script, "--port", str(lent.port))
        assert third.process.wait(timeout=10) == 1
        assert f"can't listen on 127.0.0.1:{lent.port}" in third.line()
        open_to_all = Lent(script, "--host", "0.0.0.0")  # noqa: S104
        assert open_to_all.process.wait(timeout=10) == 1
        assert "NORTHCHAT_API_KEY" in open_to_all.line()
    finally:
        second.process.kill()
        second.process.wait()


def test_looking_at_an_engine_does_not_keep_it(launch: Launch) -> None:
    import asyncio

    from northchat.client import Client

    async def visit() -> None:
        client = Client(launch.ensure())
        async for _ in client.attach():
            break
        await client.aclose()

    asyncio.run(visit())
    deadline = time.monotonic() + 10
    while list_hosts():
        assert time.monotonic() < deadline
        time.sleep(0.1)
