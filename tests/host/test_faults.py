"""Processes killed at every moment: clear words, one new engine, nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from host_rig import Script, alive, leftovers, only_host, until

from northchat.client import Client, ClientError, Health
from northchat.launch import Launch, list_hosts
from northchat.messages import Finish, Message, Text, Turn

MOMENTS = ("loading", "prefilling", "decoding", "idle")
SLOW = {
    "loading": {"load": 30.0},
    "prefilling": {"prefill": 5.0},
    "decoding": {"delay": 0.2},
    "idle": {},
}


def turn(text: str = "Hi, tell me something.") -> Turn:
    return Turn([Message("user", text)])


class Front:
    """A front end: attached, perhaps with a question under way."""

    def __init__(self, launch: Launch) -> None:
        self.client = Client(launch.ensure())
        self.health: Health | None = None
        self.events: list[object] = []
        self.error: ClientError | None = None
        self.left: ClientError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def attach(self) -> None:
        self._tasks.append(asyncio.create_task(self._watch()))

    def ask(self) -> None:
        self._tasks.append(asyncio.create_task(self._ask()))

    async def _watch(self) -> None:
        try:
            async for health in self.client.attach():
                self.health = health
        except ClientError as error:
            self.left = error

    async def _ask(self) -> None:
        try:
            async for event in self.client.stream(turn()):
                self.events.append(event)
        except ClientError as error:
            self.error = error

    async def until(self, condition: object) -> None:
        assert callable(condition)
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - most of what is waited for is in other processes
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.aclose()


@asynccontextmanager
async def fronts(launch: Launch, script: Script, moment: str, count: int) -> AsyncIterator[list[Front]]:
    """So many front ends on one host that is at that moment of its life; each of them asks, but at idle or loading."""
    script.set(**SLOW[moment])
    all_fronts = [Front(launch) for _ in range(count)]
    try:
        for front in all_fronts:
            front.attach()
        wanted = "loading" if moment == "loading" else "ready"
        for front in all_fronts:
            await front.until(lambda front=front: front.health and front.health.status == wanted)
            await front.until(lambda: len(script.core_pids) == 1)
            if moment in ("prefilling", "decoding"):
                front.ask()
            if moment == "prefilling":
                await front.until(lambda front=front: front.events)
            if moment == "decoding":
                await front.until(lambda front=front: any(isinstance(event, Text) for event in front.events))
        await all_fronts[0].until(lambda: all_fronts[0].health.clients == count)  # type: ignore[union-attr]
        yield all_fronts
    finally:
        for front in all_fronts:
            await front.stop()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_killed_core_is_replaced_by_one_new_one(launch: Launch, script: Script, moment: str) -> None:
    async with fronts(launch, script, moment, 2) as (first, second):
        (pid,) = script.core_pids
        host = only_host().info.pid
        os.kill(pid, signal.SIGKILL)
        script.set()
        for front in (first, second):
            await front.until(lambda front=front: front.health.core_restarts == 1 and front.health.status == "ready")
            if moment in ("prefilling", "decoding"):
                await front.until(lambda front=front: front.error)
                assert front.error is not None
                assert front.error.retryable
                assert "killed" in front.error.message
                assert front.error.code == "engine_restarted"
            assert front.left is None
        # The question can be asked again.
        async for event in first.client.stream(turn("again")):
            last = event
        assert isinstance(last, Finish)
        assert last.reason == "stop"
        assert len(script.core_pids) == 2
        assert not alive(pid)
        assert only_host().info.pid == host


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_killed_host_takes_its_core_along_and_the_next_launch_starts_another(
    launch: Launch, script: Script, moment: str
) -> None:
    async with fronts(launch, script, moment, 2) as (first, second):
        (core,) = script.core_pids
        host = only_host().info.pid
        os.kill(host, signal.SIGKILL)
        for front in (first, second):
            await front.until(lambda front=front: front.left)
            if moment in ("prefilling", "decoding"):
                await front.until(lambda front=front: front.error)
                assert front.error is not None
                assert front.error.retryable
        await first.until(lambda: not alive(host))
        await first.until(lambda: not alive(core))
        script.set()
        # Both front ends come back at once.
        again = [Launch(launch.model, launch.device, launch.program) for _ in range(2)]
        await asyncio.gather(*(asyncio.to_thread(one.ensure) for one in again))
        assert only_host().info.pid != host
        await first.until(lambda: len([pid for pid in script.core_pids if alive(pid)]) == 1)
        assert len(script.core_pids) == 2


CLIENT = """
    import asyncio, sys
    from northchat.client import Client
    from northchat.launch import Launch
    from northchat.messages import Message, Turn

    async def main():
        client = Client(Launch(sys.argv[1], "cpu", (sys.argv[2],)).ensure())
        async def ask():
            async for event in client.stream(Turn([Message("user", "Hi, tell me something.")])):
                pass
        task = None
        async for health in client.attach():
            if health.status == "ready" and task is None:
                task = asyncio.create_task(ask())

    asyncio.run(main())
"""


def start_client(launch: Launch) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), launch.model, launch.program[0]]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_client_is_forgotten_with_its_requests(launch: Launch, script: Script, moment: str) -> None:
    script.set(**SLOW[moment])
    client = start_client(launch)
    until(lambda: list_hosts() and only_host().health.get("clients") == 1)
    if moment != "loading":
        until(lambda: len(script.submits()) == 1)
    if moment == "idle":
        until(lambda: only_host().health["running"] == 0)
    (core,) = until(lambda: script.core_pids)
    host = only_host().info.pid
    client.kill()
    client.wait()
    if moment in ("prefilling", "decoding"):
        until(lambda: any(line.startswith("abort") for line in script.log))
    # Nobody is left: on the CPU the engine leaves too.
    until(lambda: not alive(host))
    until(lambda: not alive(core))
    assert script.core_pids == [core]
    assert not leftovers(launch.model)
    assert list_hosts() == []


async def test_one_of_two_clients_killed_leaves_the_other_alone(launch: Launch, script: Script) -> None:
    async with fronts(launch, script, "decoding", 1) as (front,):
        other = start_client(launch)
        await front.until(lambda: front.health.clients == 2 and len(script.submits()) == 2)
        other.kill()
        other.wait()
        await front.until(lambda: front.health.clients == 1)
        script.set()
        await front.until(lambda: any(isinstance(event, Finish) for event in front.events))
        assert front.error is None
        assert len([line for line in script.log if line.startswith("abort")]) == 1
        assert len(script.core_pids) == 1


async def test_a_request_that_crashes_the_core_twice_is_refused(launch: Launch, script: Script) -> None:
    async with fronts(launch, script, "idle", 1) as (front,):
        script.set(crash_on="poison")
        codes = []
        for _ in range(3):
            with pytest.raises(ClientError) as caught:
                async for _event in front.client.stream(turn("poison")):
                    pass
            codes.append(caught.value.code)
            await front.until(lambda: front.health.status == "ready")
        assert codes == ["engine_restarted", "engine_restarted", "request_crashed_engine"]
        assert len(script.core_pids) == 3
        async for event in front.client.stream(turn("something else")):
            last = event
        assert isinstance(last, Finish)


async def test_a_core_that_keeps_crashing_is_given_up(launch: Launch, script: Script) -> None:
    async with fronts(launch, script, "idle", 1) as (front,):
        for crash in range(1, 5):
            until(lambda crash=crash: len(script.core_pids) == crash)
            os.kill(script.core_pids[-1], signal.SIGKILL)
            if crash < 4:
                await front.until(lambda crash=crash: len(script.core_pids) == crash + 1)
                await front.until(lambda: front.health.status == "ready")
        await front.until(lambda: front.health.status == "failed")
        assert front.health is not None
        assert "not restarted" in (front.health.message or "")
        with pytest.raises(ClientError) as caught:
            async for _ in front.client.stream(turn()):
                pass
        assert caught.value.code == "engine_failed"
        failed = only_host().info.pid
        # A new launch gets a new host, though the failed one still has a client.
        await asyncio.to_thread(launch.ensure)
        assert only_host().info.pid != failed
        assert not alive(failed)


async def test_a_model_that_can_t_load_says_why(launch: Launch, script: Script, home: Path) -> None:
    script.set(fail="model.gguf is truncated; download it again")
    front = Front(launch)
    front.attach()
    try:
        await front.until(lambda: front.health and front.health.status == "failed")
        assert front.health is not None
        assert front.health.message == "model.gguf is truncated; download it again"
        assert front.health.core_restarts == 0
    finally:
        await front.stop()
