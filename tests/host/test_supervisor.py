"""The core as its supervisor sees it: silent, garbled, overloaded, gone."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from host_rig import HERE, Script, alive, leftovers
from scripted_core import MARKERS

from northchat.engine import protocol
from northchat.host.errors import ApiError
from northchat.host.state import State
from northchat.host.supervisor import Limits, Mailbox, Supervisor


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - waits for another process
            await asyncio.sleep(0.01)


@asynccontextmanager
async def supervised(
    script: Script, limits: Limits | None = None, command: list[str] | None = None
) -> AsyncIterator[tuple[Supervisor, State]]:
    state = State("scripted", "cpu")
    supervisor = Supervisor(state, limits or Limits(backoff=0.01))
    supervisor.open()
    core = [sys.executable, str(HERE / "scripted_core.py"), "--model", str(script.path), "--device", "cpu"]
    task = asyncio.create_task(supervisor.run(command or [*core, "--dtype", "auto"]))
    try:
        yield supervisor, state
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not leftovers(str(script.path))


def request(text: str = "Hi", max_tokens: int = 100) -> protocol.Submit:
    return protocol.Submit(0, list(text.encode()), max_tokens, protocol.Sampling())


async def collect(mailbox: Mailbox, count: int = 1) -> list[int]:
    ids: list[int] = []
    async with asyncio.timeout(10):
        while count:
            for output in await mailbox.take(10):
                ids += output.ids
                count -= output.finish is not None
    return [token for token in ids if token != MARKERS["<|im_end|>"]]


async def test_a_request_and_its_outputs(script: Script) -> None:
    script.set(load=0.2)
    async with supervised(script) as (supervisor, state):
        with pytest.raises(ApiError, match="loading"):
            supervisor.submit(Mailbox(), request())
        await until(lambda: state.health.status == "ready")
        assert (state.health.device, state.health.dtype, state.health.max_model_len) == ("scripted cpu", "int8", 2048)
        mailbox = Mailbox()
        supervisor.submit(mailbox, request("Hi"))
        assert supervisor.busy
        assert await collect(mailbox) == [*b"Hi"]
        assert not supervisor.busy


async def test_whoever_reads_late_gets_all_at_once(script: Script) -> None:
    async with supervised(script) as (supervisor, state):
        await until(lambda: state.health.status == "ready")
        mailbox = Mailbox()
        supervisor.submit(mailbox, request("abc"))
        await until(lambda: not supervisor.busy)
        outputs = await mailbox.take(1)
        assert [token for output in outputs for token in output.ids][:3] == [*b"abc"]
        assert outputs[-1].finish == "length"
        assert await mailbox.take(0.01) == []


async def test_a_core_that_hangs_is_killed_and_replaced(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    script.set(hang_on="Hi")
    async with supervised(script, Limits(step=0.3, backoff=0.01)) as (supervisor, state):
        await until(lambda: state.health.status == "ready")
        (pid,) = script.core_pids
        mailbox = Mailbox()
        supervisor.submit(mailbox, request("Hi"))
        with pytest.raises(ApiError, match="said nothing for 0 s and was killed") as caught:
            await collect(mailbox)
        assert (caught.value.status, caught.value.code, caught.value.retry) == (503, "engine_restarted", True)
        await until(lambda: state.health.status == "ready")
        assert not alive(pid)
        assert len(script.core_pids) == 2
    # The stacks of its threads are in the log.
    assert "Fatal Python error: Aborted" in capfd.readouterr().err


async def test_an_idle_core_may_be_silent(script: Script) -> None:
    async with supervised(script, Limits(step=0.1, backoff=0.01)) as (supervisor, state):
        await until(lambda: state.health.status == "ready")
        await asyncio.sleep(0.4)
        mailbox = Mailbox()
        supervisor.submit(mailbox, request())
        assert await collect(mailbox) == [*b"Hi"]
        assert state.health.core_restarts == 0


async def test_a_core_that_hangs_while_it_loads_is_killed(script: Script) -> None:
    script.set(load=30)
    async with supervised(script, Limits(load=0.3, backoff=0.01, stop=0.5)) as (_, state):
        await until(lambda: state.health.core_restarts == 1)
        assert "said nothing" in (state.health.message or "")
        script.set()
        await until(lambda: state.health.status == "ready")
        assert state.health.message is None


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("s.sendall(b'\\x05\\0\\0\\0hello'); s.recv(1)", "can't be understood"),
        ("s.sendall(b'\\xff\\xff\\xff\\xff'); s.recv(1)", "can't be understood"),
        ("p.send(s, p.Ready(99, 'x', 'y', 1, 1)); s.recv(1)", "version 99"),
        ("p.send(s, p.Abort(1)); s.recv(1)", "can't be understood"),
        ("sys.exit(7)", "exit code 7"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
async def test_a_core_that_misbehaves_is_given_up_after_a_while(script: Script, program: str, words: str) -> None:
    prelude = (
        "import socket, sys; from northchat.engine import protocol as p; s = socket.socket(fileno=int(sys.argv[-1]))"
    )
    command = [sys.executable, "-c", f"{prelude}; {program}", str(script.path)]
    async with supervised(script, Limits(backoff=0.01, crashes=2), command) as (supervisor, state):
        await until(lambda: state.health.status == "failed")
        assert words in (state.health.message or "")
        assert "crashed 2 times" in (state.health.message or "")
        with pytest.raises(ApiError) as caught:
            supervisor.submit(Mailbox(), request())
        assert caught.value.retry is False


async def test_no_more_requests_than_the_queue_holds(script: Script) -> None:
    script.set(delay=0.05)
    async with supervised(script, Limits(queue=2)) as (supervisor, state):
        await until(lambda: state.health.status == "ready")
        mailbox = Mailbox()
        first = supervisor.submit(mailbox, request("abcdefgh"))
        supervisor.submit(mailbox, request("abcdefgh"))
        with pytest.raises(ApiError) as caught:
            supervisor.submit(mailbox, request())
        assert (caught.value.status, caught.value.code) == (503, "server_overloaded")
        assert caught.value.retry_after
        supervisor.abort(first)
        supervisor.submit(mailbox, request("ab"))
        await until(lambda: state.health.running > 0)


async def test_aborting_twice_or_too_late_is_no_error(script: Script) -> None:
    async with supervised(script) as (supervisor, state):
        await until(lambda: state.health.status == "ready")
        mailbox = Mailbox()
        rid = supervisor.submit(mailbox, request())
        supervisor.abort(rid)
        supervisor.abort(rid)
        supervisor.abort(999)
        supervisor.submit(mailbox, request("next"))
        assert await collect(mailbox) == [*b"next"]
