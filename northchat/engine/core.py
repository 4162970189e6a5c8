"""The core process: one thread that receives requests, schedules, launches step N and publishes step N-1.

Started by the host as `python -m northchat.engine.core --model PATH --fd N`, with one end of a socketpair. It ends
with its host: by a signal from the kernel, or by the end of file on the socket. Exit codes: 0 the host wanted it,
1 it failed (the last frames say why), 2 usage.
"""

import argparse
import ctypes
import faulthandler
import gc
import importlib
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from northchat.engine.executor import PAGE, Executor, ExecutorError
from northchat.engine.grammar import GrammarError, Grammars, Matcher
from northchat.engine.kv_cache import KVCache, plan
from northchat.engine.protocol import (
    VERSION,
    Abort,
    Failed,
    FrameBuffer,
    FromCore,
    Loading,
    Output,
    ProtocolError,
    Ready,
    Step,
    Submit,
    ToCore,
    send,
)
from northchat.engine.scheduler import Launch, Scheduler
from northchat.model.weights import ModelError

_READ = 1 << 18


@dataclass(frozen=True)
class Limits:
    """What a device is good for."""

    rows: int
    """Requests that run at once."""
    chunk: int
    """Prefill tokens of a step that only prefills."""
    mixed_chunk: int
    """Prefill tokens of a step that decodes too: how long others wait for their next token."""
    overlap: bool
    """Whether `submit` returns before the step is done, so that publishing the last one hides behind it."""
    kv_memory: int
    """Bytes of KV pages beyond which more are only taken for one request of full length."""
    kv_share: float
    """Most of the free memory that KV pages take unasked."""


LIMITS = {
    "cpu": Limits(rows=16, chunk=256, mixed_chunk=128, overlap=False, kv_memory=256 << 20, kv_share=0.5),
    "cuda": Limits(rows=32, chunk=2048, mixed_chunk=2048, overlap=True, kv_memory=1 << 50, kv_share=1.0),
}


class CoreError(Exception):
    """The core can't start; the message names cause and remedy in one line."""


class Rate:
    """Events per second over about the last second, at constant cost."""

    def __init__(self, now: float) -> None:
        self._count = 0
        self._old = self._mark = (now, 0)

    def add(self, now: float) -> float | None:
        """Count one; returns the rate, None while too little time has passed to say."""
        self._count += 1
        if now - self._mark[0] >= 0.5:
            self._old, self._mark = self._mark, (now, self._count)
        elapsed = now - self._old[0]
        return (self._count - self._old[1]) / elapsed if elapsed > 0.05 else None


class Core:
    """Serves one host over `sock` with `executor`, whose pools it allocates."""

    def __init__(
        self,
        executor: Executor,
        sock: socket.socket,
        limits: Limits,
        kv_memory: int | None = None,
        page_size: int = PAGE,
        tokenizer_json: Path | None = None,
    ) -> None:
        """tokenizer_json: for grammars. Raises CoreError when not even a short request fits in memory."""
        self._executor = executor
        self._sock = sock
        self._overlap = limits.overlap
        self._frames = FrameBuffer(ToCore)
        self._open = True
        self._rates: dict[int, Rate] = {}
        self._told = (0, 0)
        self._grammars = Grammars(tokenizer_json, executor.vocab_size)
        self._compiling: dict[int, tuple[Submit, Future[Matcher]]] = {}
        """Requests whose grammar isn't there yet; what runs isn't held up by them."""
        memory = _kv_memory(executor, limits, page_size) if kv_memory is None else kv_memory
        pages, self.max_model_len = plan(
            executor.groups, memory, executor.max_context, limits.rows, limits.chunk, page_size
        )
        if self.max_model_len < page_size:
            raise CoreError(
                f"{memory / 2**20:.1f} MiB is too little memory for the KV cache; allow more with --kv-memory"
            )
        executor.allocate(pages)
        self.scheduler = Scheduler(
            KVCache(executor.groups, pages, limits.chunk, page_size),
            executor.vocab_size,
            self.max_model_len,
            limits.chunk,
            limits.mixed_chunk,
            limits.rows,
        )

    def run(self) -> int:
        """Serve until the host ends it (0) or the device fails (1)."""
        self._send(self._ready())
        flight: tuple[int, Launch] | None = None
        try:
            while True:
                idle = flight is None and not self.scheduler.busy
                self._receive(wait=idle and not self._compiling)
                if not self._open:
                    return 0
                self._take_compiled(wait=idle and not self.scheduler.busy)
                launch = self.scheduler.schedule()
                started = (self._executor.submit(launch.batch), launch) if launch.rows else None
                if flight is not None:
                    self._publish(*flight)
                elif started is None and self.scheduler.busy:
                    raise RuntimeError("requests wait, but none can run")
                if started is not None and not self._overlap:
                    self._publish(*started)
                    started = None
                flight = started
        except (BrokenPipeError, ConnectionResetError):
            return 0
        except (ExecutorError, MemoryError) as error:
            self._fail(str(error) or "out of memory")
        except Exception as error:
            traceback.print_exc()
            self._fail(f"internal error in the engine ({type(error).__name__}: {error}); the log has the details")
        finally:
            self._grammars.close()
        return 1

    def _ready(self) -> Ready:
        executor = self._executor
        notes = []
        if self.max_model_len < executor.max_context:
            notes.append(
                f"context limited to {self.max_model_len} of the model's {executor.max_context} tokens, "
                "which is what fits in memory; --kv-memory allows more"
            )
        return Ready(VERSION, executor.device, executor.dtype, executor.vocab_size, self.max_model_len, notes)

    def _receive(self, wait: bool) -> None:
        """Take in what the host sent; sleeps in the kernel for it when there is nothing to do."""
        while self._open:
            try:
                data = self._sock.recv(_READ, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._open = bool(data)
            outputs = [output for frame in self._frames.feed(data) if (output := self._handle(frame)) is not None]
            if self._open:
                self._report(outputs)
            wait = wait and not self.scheduler.busy and not self._compiling

    def _handle(self, frame: object) -> Output | None:
        match frame:
            case Submit() if frame.grammar:
                generated = frame.prompt[len(frame.prompt) - frame.generated :]
                self._compiling[frame.rid] = frame, self._grammars.start(frame.grammar, generated)
                return None
            case Submit():
                return self.scheduler.add(frame)
            case Abort():
                if self._compiling.pop(frame.rid, None) is not None:
                    return Output(rid=frame.rid, finish="abort")
                return self.scheduler.abort(frame.rid)
            case _:
                self._open = False
                return None

    def _take_compiled(self, wait: bool) -> None:
        """Queue requests whose grammar is there. With nothing else to do, the first is waited for."""
        outputs = []
        for rid, (submit, future) in list(self._compiling.items()):
            if not (wait or future.done()):
                continue
            wait = False
            del self._compiling[rid]
            try:
                output = self.scheduler.add(submit, future.result())
            except (GrammarError, ModelError) as error:
                output = Output(rid=rid, finish="error", message=str(error))
            if output is not None:
                outputs.append(output)
        if outputs:
            self._report(outputs)

    def _publish(self, handle: int, launch: Launch) -> None:
        outputs = self.scheduler.publish(launch, self._executor.poll(handle))
        now = time.monotonic()
        for output in outputs:
            if output.ids:
                rate = self._rates.get(output.rid)
                if rate is None:
                    # The first token ends the prefill; the rate counts from it.
                    self._rates[output.rid] = Rate(now)
                else:
                    output.tok_s = rate.add(now)
        self._report(outputs)

    def _report(self, outputs: list[Output]) -> None:
        scheduler = self.scheduler
        for rid in scheduler.retired:
            self._executor.release(rid)
            self._rates.pop(rid, None)
        scheduler.retired.clear()
        counts = (len(scheduler.running), len(scheduler.waiting) + len(self._compiling))
        if outputs or counts != self._told:
            self._told = counts
            self._send(Step(outputs, *counts, scheduler.cache.used(), scheduler.preemptions))

    def _fail(self, message: str) -> None:
        print(message, file=sys.stderr)
        outputs = [
            Output(rid=request.submit.rid, finish="error", message=message)
            for request in (*self.scheduler.running, *self.scheduler.waiting)
        ]
        outputs += [Output(rid=rid, finish="error", message=message) for rid in self._compiling]
        try:
            self._send(Step(outputs))
        except OSError:
            return

    def _send(self, frame: FromCore) -> None:
        send(self._sock, frame)


def _kv_memory(executor: Executor, limits: Limits, page_size: int) -> int:
    """Bytes for the KV pools when nobody said: modest, but enough for one request of full length."""
    whole = -(-executor.max_context // page_size)
    one = whole * sum(group.page_bytes for group in executor.groups)
    return min(int(executor.free_memory() * limits.kv_share), max(limits.kv_memory, one))


class _LoadingProgress:
    """Passes progress on to the host, ten times a second at most."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._last: tuple[str, float] = ("", 0.0)

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._last[0] or done >= total or now - self._last[1] >= 0.1:
            self._last = (what, now)
            send(self._sock, Loading(what, done, total))


def _size(text: str) -> int:
    """Bytes of `512M`, `2G` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 512M or 2G")
    return int(float(match[1]) * (1 << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]))


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _orphaned(sock: socket.socket) -> bool:
    """Whether the host died before it could be our death's cause: the kernel tells of later deaths only."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _serve(args: argparse.Namespace, sock: socket.socket) -> int:
    device = importlib.import_module(f"northchat.engine.{args.device}")
    executor: Executor = device.load(args.model, args.dtype, _LoadingProgress(sock))
    core = Core(executor, sock, LIMITS[args.device], args.kv_memory, tokenizer_json=args.tokenizer)
    # What loading left alive stays; a full collection over it would stall a step.
    gc.collect()
    gc.freeze()
    return core.run()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m northchat.engine.core", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or HF directory")
    parser.add_argument("--device", choices=sorted(LIMITS), default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokenizer", type=Path, help="the model's tokenizer.json, for answers that follow a grammar")
    parser.add_argument("--kv-memory", type=_size, help="bytes of KV pages, e.g. 512M")
    parser.add_argument("--fd", type=int, required=True, help="our end of a socketpair with the host")
    args = parser.parse_args(argv)
    _die_with_parent()
    faulthandler.enable()
    # Ctrl-C reaches the whole foreground group; what it means is the host's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=args.fd) as sock:
        try:
            return 0 if _orphaned(sock) else _serve(args, sock)
        except (BrokenPipeError, ConnectionResetError):
            return 0
        except Exception as error:
            message = _why(error)
            try:
                send(sock, Failed(message))
            except OSError:
                return 1
            return 1


def _why(error: Exception) -> str:
    """One line for the user; the traceback, where it can tell more, goes to the log."""
    if isinstance(error, (CoreError, ExecutorError, ModelError, ProtocolError)):
        message = str(error)
    elif isinstance(error, MemoryError):
        message = "out of memory while loading the model; close other programs or choose a smaller model"
    else:
        traceback.print_exc()
        message = f"loading failed ({type(error).__name__}: {error}); the log has the details"
    return " ".join(message.split())


if __name__ == "__main__":
    # Without the interpreter's clean-up, which takes torch noticeable time and frees only what the kernel frees.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
