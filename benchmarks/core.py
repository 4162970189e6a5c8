"""What the core itself costs per decode step: receive, schedule, publish and send, around a device that does nothing.

    python -m benchmarks.core --out benchmarks/results/core.json

CPU time of its thread, so what else runs on the machine matters little. A decode step of the 30B model on one H200
takes 1,500 us, one of SmolLM2 on two CPU cores 12,000 us.
"""

import argparse
import json
import platform
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from northchat.engine.core import Core, Limits
from northchat.engine.executor import Batch, KVGroup, Sampled
from northchat.engine.protocol import Sampling, Shutdown, Submit, send

STEPS = 2000


class Nothing:
    """Answers every row with the same token and has one full and one sliding group, as the 30B model."""

    device = "none"
    dtype = "none"
    vocab_size = 1000
    groups = (KVGroup("full", (0,), None, 1), KVGroup("sliding", (1,), 4096, 1))

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.decoding = 0
        self.cpu = 0.0
        self._rows: dict[int, list[Sampled]] = {}
        self._handle = 0
        self._since = 0.0

    def free_memory(self) -> int:
        return 1 << 40

    def allocate(self, pages: Sequence[int]) -> None:
        pass

    def submit(self, batch: Batch) -> int:
        now = time.thread_time()
        if batch.decode and not batch.prefill and self._since:
            self.decoding += 1
            self.cpu += now - self._since
        self._since = now if batch.decode and not batch.prefill else 0.0
        rows = batch.decode + batch.prefill
        self._handle += 1
        self._rows[self._handle] = [Sampled(row.rid, 1 if row.sample else None) for row in rows]
        return self._handle

    def poll(self, handle: int) -> list[Sampled]:
        return self._rows.pop(handle)

    def release(self, rid: int) -> None:
        pass


def microseconds(rows: int, context: int) -> float:
    """CPU time per decode step of so many requests that each have so much context."""
    executor = Nothing(context + STEPS + 64)
    ours, theirs = socket.socketpair()
    limits = Limits(rows=rows, chunk=2048, mixed_chunk=2048, overlap=True, kv_memory=1 << 40, kv_share=1.0)
    core = threading.Thread(target=lambda: Core(executor, theirs, limits).run())
    core.start()
    with ours, theirs:
        for rid in range(rows):
            send(ours, Submit(rid, [rid % 1000] * context, STEPS, Sampling()))
        # Reading nothing would fill the socket; decoding what is read would compete for the interpreter.
        tail = b""
        finished = 0
        while finished < rows:
            data = tail + ours.recv(1 << 20)
            finished += data.count(b"length")
            tail = data[-5:]
        send(ours, Shutdown())
        core.join()
    return executor.cpu / executor.decoding * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the core per decode step")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    figures = []
    print(f"{'requests':>8}{'context':>10}{'us per step':>14}")
    for rows, context in ((1, 100), (1, 100_000), (8, 10_000), (32, 10_000)):
        cost = round(microseconds(rows, context), 1)
        print(f"{rows:>8}{context:>10}{cost:>14}")
        figures.append({"requests": rows, "context": context, "us_per_step": cost})
    if args.out:
        environment = {"python": platform.python_version(), "machine": platform.machine()}
        args.out.write_text(json.dumps({"environment": environment, "decode_step": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
