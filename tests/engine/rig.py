"""Drives scheduler and pages as the core does, without its process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_executor import FakeExecutor

from northchat.engine.executor import Executor
from northchat.engine.kv_cache import KVCache
from northchat.engine.protocol import Output, Sampling, Submit
from northchat.engine.scheduler import Launch, Scheduler


@dataclass
class Got:
    ids: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def finish(self) -> str | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def cached(self) -> int | None:
        return next((output.cached for output in self.outputs if output.cached is not None), None)


class Rig:
    """Checks integrity after each step; `got` has what each request was given."""

    def __init__(
        self,
        windows: Sequence[int | None] = (None,),
        pages: Sequence[int] = (64,),
        page: int = 4,
        chunk: int = 8,
        mixed_chunk: int = 4,
        rows: int = 4,
        limit: int = 64,
        overlap: bool = False,
        executor: Executor | None = None,
    ) -> None:
        self.windows = windows
        self.executor: Any = executor or FakeExecutor(windows, page, limit)
        self.executor.allocate(pages)
        cache = KVCache(self.executor.groups, pages, chunk, page, key=b"fixed")
        self.scheduler = Scheduler(cache, self.executor.vocab_size, limit, chunk, mixed_chunk, rows)
        self.got: dict[int, Got] = {}
        self._overlap = overlap
        self._flight: tuple[int, Launch] | None = None

    def add(
        self, rid: int, prompt: Sequence[int], max_tokens: int = 4, sampling: Sampling | None = None, **more: object
    ) -> Got:
        self.got[rid] = Got()
        refusal = self.scheduler.add(Submit(rid, list(prompt), max_tokens, sampling or Sampling(), **more))
        self._take([refusal] if refusal else [])
        return self.got[rid]

    def abort(self, rid: int) -> None:
        output = self.scheduler.abort(rid)
        self._take([output] if output else [])

    def step(self) -> Launch:
        launch = self.scheduler.schedule()
        self._check()
        started = (self.executor.submit(launch.batch), launch) if launch.rows else None
        if self._flight is not None:
            self._publish()
        self._flight = started
        if not self._overlap and started is not None:
            self._publish()
        return launch

    def run(self, steps: int = 1000) -> None:
        while self.scheduler.busy or self._flight:
            self.step()
            steps -= 1
            assert steps, "no end in sight"

    def _publish(self) -> None:
        assert self._flight is not None
        (handle, launch), self._flight = self._flight, None
        self._take(self.scheduler.publish(launch, self.executor.poll(handle)))
        self._check()

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            got = self.got[output.rid]
            assert got.finish is None, "an output after the last one"
            got.ids += output.ids
            got.outputs.append(output)
        for rid in self.scheduler.retired:
            self.executor.release(rid)
        self.scheduler.retired.clear()

    def _check(self) -> None:
        scheduler = self.scheduler
        scheduler.cache.check_integrity(request.table for request in (*scheduler.running, *scheduler.waiting))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 37 + n * n + 3 * n) % 97 for n in range(length)]
