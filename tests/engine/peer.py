"""The host's end of a core that runs in a thread."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from northchat.engine.core import Core, Limits
from northchat.engine.executor import Executor
from northchat.engine.protocol import FrameBuffer, FromCore, Output, Ready, Sampling, Step, Submit, send

LIMITS = Limits(rows=4, chunk=8, mixed_chunk=4, overlap=False, kv_memory=1 << 20, kv_share=1.0)


class Peer:
    """The host's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(20)
        self._frames = FrameBuffer(FromCore)
        self._queue: list[object] = []
        self.steps: list[Step] = []

    def next(self) -> object:
        """The next frame; None at the end of file."""
        while not self._queue:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._queue += self._frames.feed(data)
        return self._queue.pop(0)

    def until_finished(self, *rids: int) -> dict[int, list[Output]]:
        outputs: dict[int, list[Output]] = {rid: [] for rid in rids}
        while not all(got and got[-1].finish for got in outputs.values()):
            frame = self.next()
            assert isinstance(frame, Step), frame
            self.steps.append(frame)
            for output in frame.outputs:
                outputs.setdefault(output.rid, []).append(output)
        return outputs

    def submit(
        self, rid: int, prompt: list[int], max_tokens: int = 6, sampling: Sampling | None = None, **more: object
    ) -> None:
        send(self.sock, Submit(rid, prompt, max_tokens, sampling or Sampling(), **more))  # type: ignore[arg-type]


def ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.ids]


@contextmanager
def serving(
    executor: Executor,
    limits: Limits = LIMITS,
    kv_memory: int | None = None,
    page_size: int = 4,
    tokenizer_json: Path | None = None,
) -> Iterator[tuple[Peer, Ready, list[int]]]:
    """A core in a thread; the list gets its exit code."""
    ours, theirs = socket.socketpair()
    codes: list[int] = []

    def run() -> None:
        with theirs:
            codes.append(Core(executor, theirs, limits, kv_memory, page_size, tokenizer_json).run())

    thread = threading.Thread(target=run)
    thread.start()
    with ours:
        try:
            peer = Peer(ours)
            ready = peer.next()
            assert isinstance(ready, Ready)
            yield peer, ready, codes
            ours.shutdown(socket.SHUT_RDWR)
        finally:
            ours.close()
            thread.join(20)
    assert not thread.is_alive()
