"""The core over a real socket, with a fake model in place of a device."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_executor import FakeExecutor, alone
from peer import LIMITS, Peer, ids, serving

from northchat.engine.core import Core, CoreError, Limits, Rate
from northchat.engine.protocol import (
    Abort,
    Failed,
    Loading,
    Ready,
    Sampling,
    Shutdown,
    Step,
    Submit,
    encode,
    send,
)


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_at_once_get_their_own_tokens(overlap: bool) -> None:
    windows = (None, 6)
    executor = FakeExecutor(windows)
    limits = Limits(rows=4, chunk=8, mixed_chunk=4, overlap=overlap, kv_memory=1 << 20, kv_share=1.0)
    prompts = {rid: [rid, *range(rid + 9)] for rid in range(1, 9)}
    with serving(executor, limits) as (peer, _, codes):
        for rid, prompt in prompts.items():
            peer.submit(rid, prompt)
        got = peer.until_finished(*prompts)
        send(peer.sock, Shutdown())
        assert peer.next() is None
    for rid, prompt in prompts.items():
        assert ids(got[rid]) == alone(windows, prompt, 6)
        assert got[rid][-1].finish == "length"
    assert codes == [0]
    assert max(step.running for step in peer.steps) == 4
    assert max(step.waiting for step in peer.steps) >= 4
    assert 0 < max(step.kv_used for step in peer.steps) <= 1
    assert sorted(executor.released) == sorted(prompts)


def test_the_second_turn_says_what_was_cached_and_how_far_prefill_is() -> None:
    with serving(FakeExecutor(max_context=256)) as (peer, _, _):
        prompt = list(range(32))
        peer.submit(1, prompt)
        first = peer.until_finished(1)[1]
        assert first[0].cached == 0
        assert [output.computed for output in first[:4]] == [8, 16, 24, 32]
        peer.submit(2, [*prompt, *ids(first), 5, 6, 7])
        second = peer.until_finished(2)[2]
        assert second[0].cached == 36
        assert second[0].computed == 41


def test_abort_while_waiting_prefilling_and_decoding() -> None:
    limits = Limits(rows=1, chunk=1, mixed_chunk=1, overlap=True, kv_memory=1 << 20, kv_share=1.0)
    with serving(FakeExecutor(max_context=2000), limits) as (peer, _, _):
        peer.submit(1, [1, 2, 3], 1900)
        peer.submit(2, [4, 5, 6], 1900)
        while not (isinstance(frame := peer.next(), Step) and any(o.ids for o in frame.outputs)):
            pass
        for rid in (2, 1):
            send(peer.sock, Abort(rid))
        got = peer.until_finished(1, 2)
        assert [got[rid][-1].finish for rid in (1, 2)] == ["abort", "abort"]
        peer.submit(3, list(range(90)) * 20, 4)
        while not (isinstance(frame := peer.next(), Step) and any(o.computed for o in frame.outputs)):
            pass
        send(peer.sock, Abort(3))
        assert peer.until_finished(3)[3][-1].finish == "abort"
        send(peer.sock, Abort(3))
        send(peer.sock, Abort(99))
        peer.submit(4, [1, 2, 3], 5)
        assert ids(peer.until_finished(4)[4]) == alone((None,), [1, 2, 3], 5)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([], "the prompt is empty"), ([0] * 64, "the prompt has 64 tokens"), ([5, 97], "token ids outside of 0..96")],
)
def test_a_request_that_cannot_be_served_ends_in_one_line(prompt: list[int], expected: str) -> None:
    with serving(FakeExecutor()) as (peer, _, _):
        peer.submit(1, prompt)
        (output,) = peer.until_finished(1)[1]
        assert output.finish == "error"
        assert expected in output.message
        assert "\n" not in output.message
        peer.submit(2, [1])
        assert ids(peer.until_finished(2)[2]) == alone((None,), [1], 6)


def test_a_failing_device_ends_every_request_and_the_core() -> None:
    with serving(FakeExecutor(fail_at=3)) as (peer, _, codes):
        # In one piece: the core has read all of them before its first step.
        peer.sock.sendall(b"".join(encode(Submit(rid, [rid, 2, 3], 30, Sampling())) for rid in range(1, 7)))
        got = peer.until_finished(*range(1, 7))
        assert peer.next() is None
    assert all(outputs[-1].finish == "error" for outputs in got.values())
    assert all(outputs[-1].message == "the fake device failed; buy a real one" for outputs in got.values())
    assert codes == [1]


def test_context_is_lowered_to_what_memory_holds_and_said_so() -> None:
    # One page is 4 tokens and 1000 bytes.
    with serving(FakeExecutor(max_context=64), kv_memory=10_500) as (peer, ready, _):
        assert ready.max_model_len == 40
        (note,) = ready.notes
        assert "40 of the model's 64" in note
        assert "--kv-memory" in note
        peer.submit(1, [1, 2, 3], 500)
        outputs = peer.until_finished(1)[1]
        assert len(ids(outputs)) == 37
        assert outputs[-1].finish == "length"


def test_no_memory_for_a_single_page_is_an_error_with_a_remedy() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(CoreError, match="--kv-memory"):
        Core(FakeExecutor(memory=999), theirs, LIMITS, page_size=4)


def test_a_host_that_goes_away_ends_the_core_in_the_middle_of_work() -> None:
    with serving(FakeExecutor(max_context=100_000)) as (peer, _, codes):
        peer.submit(1, [1], 90_000)
        peer.next()
    assert codes == [0]


def test_bytes_that_are_no_frames_end_the_core_with_an_error() -> None:
    with serving(FakeExecutor()) as (peer, _, codes):
        peer.sock.sendall(b"\x03\x00\x00\x00abc")
        while peer.next() is not None:
            pass
    assert codes == [1]


def test_an_idle_core_uses_no_cpu() -> None:
    with serving(FakeExecutor()) as (peer, _, _):
        peer.submit(1, [1])
        peer.until_finished(1)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.02


def test_rate_is_of_about_the_last_second() -> None:
    rate = Rate(0.0)
    seen = [rate.add(step / 100) for step in range(1, 201)]
    assert seen[0] is None
    assert seen[-1] == pytest.approx(100)
    slow = [rate.add(2 + step / 10) for step in range(1, 21)]
    assert slow[-1] == pytest.approx(10)
    assert 10 < slow[2] < 100  # type: ignore[operator]


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

FAKE_DEVICE = """
    import os, sys, time, types
    sys.path.insert(0, {tests!r})
    from fake_executor import FakeExecutor
    from northchat.engine import core

    def load(path, dtype, progress):
        for done in range(0, 1001):
            progress("weights", done, 1000)
        if path.name == "broken":
            raise {error}
        time.sleep({seconds})
        return FakeExecutor(page=64, max_context=512)

    module = types.ModuleType("northchat.engine.cpu")
    module.load = load
    sys.modules["northchat.engine.cpu"] = module
    sys.exit(core.main(sys.argv[1:]))
"""


def program(error: str = "ValueError('x')", seconds: float = 0) -> list[str]:
    """The core as its host starts it, with the fake in the device's place."""
    code = textwrap.dedent(FAKE_DEVICE).format(tests=str(Path(__file__).parent), error=error, seconds=seconds)
    return [sys.executable, "-c", code]


@contextmanager
def process(command: list[str], *arguments: str) -> Iterator[tuple[Peer, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = subprocess.Popen(
                [*command, *arguments, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()], env=ENVIRONMENT
            )
        try:
            yield Peer(ours), child
        finally:
            child.kill()
            child.wait()


def test_the_process_reports_loading_serves_ignores_ctrl_c_and_leaves_when_told() -> None:
    with process(program(), "--model", "model", "--kv-memory", "8K") as (peer, child):
        frames = []
        while not isinstance(frame := peer.next(), Ready):
            frames.append(frame)
        assert frames[0] == Loading("weights", 0, 1000)
        assert frames[-1] == Loading("weights", 1000, 1000)
        assert len(frames) < 20, "progress isn't throttled"
        assert frame.max_model_len == 512
        child.send_signal(signal.SIGINT)
        peer.submit(1, [1, 2, 3])
        assert ids(peer.until_finished(1)[1]) == alone((None,), [1, 2, 3], 6)
        send(peer.sock, Shutdown())
        assert child.wait(10) == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("core.ExecutorError('no such instruction set; buy a newer CPU')", "no such instruction set; buy a newer CPU"),
        ("core.ModelError('model is cut short;\\n fetch it again')", "model is cut short; fetch it again"),
        ("MemoryError()", "out of memory"),
        ("ValueError('surprise')", "ValueError: surprise"),
    ],
)
def test_a_model_that_does_not_load_ends_in_one_line_and_exit_code_1(error: str, expected: str) -> None:
    with process(program(error), "--model", "broken") as (peer, child):
        while isinstance(frame := peer.next(), Loading):
            pass
        assert isinstance(frame, Failed)
        assert expected in frame.message
        assert "\n" not in frame.message
        assert child.wait(10) == 1


# A host that is killed while its core is busy: nobody reads or writes the socket, only the kernel tells the core.
HOST = """
    import os, socket, subprocess, sys
    from northchat.engine.protocol import FrameBuffer, FromCore
    ours, theirs = socket.socketpair()
    command = [*sys.argv[1:], "--model", "model", "--fd", str(theirs.fileno())]
    core = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    frames = FrameBuffer(FromCore)
    while not any(frame.done == 1000 for frame in frames.feed(ours.recv(1 << 16))):
        pass
    print(core.pid, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_the_process_ends_with_its_host_even_while_it_loads() -> None:
    command = [sys.executable, "-c", textwrap.dedent(HOST), *program(seconds=60)]
    host = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, env=ENVIRONMENT, check=False)
    assert host.returncode == -signal.SIGKILL
    core = int(host.stdout)
    deadline = time.monotonic() + 5
    while _alive(core):
        assert time.monotonic() < deadline, "the core outlives its host"
        time.sleep(0.02)


def test_a_process_whose_host_is_gone_when_it_starts_loads_nothing() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        command = [*program(seconds=60), "--model", "model", "--fd", str(theirs.fileno())]
        done = subprocess.run(command, pass_fds=[theirs.fileno()], env=ENVIRONMENT, timeout=20, check=False)
    assert done.returncode == 0


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("size", ["much", "-1", "5T", ""])
def test_a_size_that_is_none_is_a_usage_error(size: str) -> None:
    command = [sys.executable, "-m", "northchat.engine.core", "--model", "m", "--fd", "0", f"--kv-memory={size}"]
    child = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, check=False)
    assert child.returncode == 2
    assert "write it like 512M or 2G" in child.stderr


def test_memory_for_pages_is_modest_unless_one_long_request_needs_more() -> None:
    def pages(memory: int, **more: int) -> int:
        executor = FakeExecutor(memory=memory, **more)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            limits = Limits(rows=8, chunk=8, mixed_chunk=4, overlap=False, kv_memory=20_000, kv_share=0.5)
            return Core(executor, theirs, limits, page_size=4).scheduler.cache.pools[0].size

    assert pages(1_000_000, max_context=64) == 20
    assert pages(1_000_000, max_context=400) == 100
    assert pages(60_000, max_context=400) == 30
    assert pages(1_000_000, max_context=8) == 16
