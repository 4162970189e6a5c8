"""Scheduler and pages together, against a model that knows only what its pages say."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from fake_executor import FakeExecutor, alone
from hypothesis import given, settings
from hypothesis import strategies as st

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
    """Drives a scheduler as the core does, checking integrity after each step."""

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
    ) -> None:
        self.executor = FakeExecutor(windows, page, limit)
        self.executor.allocate(pages)
        cache = KVCache(self.executor.groups, pages, chunk, page, key=b"fixed")
        self.scheduler = Scheduler(cache, self.executor.vocab_size, limit, chunk, mixed_chunk, rows)
        self.got: dict[int, Got] = {}
        self._overlap = overlap
        self._flight: tuple[int, Launch] | None = None

    def add(self, rid: int, prompt: Sequence[int], max_tokens: int = 4, **more: object) -> Got:
        self.got[rid] = Got()
        refusal = self.scheduler.add(Submit(rid, list(prompt), max_tokens, Sampling(), **more))
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


@dataclass
class Job:
    at: int
    prompt: list[int]
    max_tokens: int
    stop_ids: list[int]
    min_tokens: int
    abort_at: int | None


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    stems = [prompt(length, seed) for seed, length in enumerate(draw(st.lists(st.integers(1, 30), min_size=1)))]
    made = []
    for _ in range(draw(st.integers(1, 8))):
        stem = draw(st.sampled_from(stems))
        ids = stem[: draw(st.integers(1, len(stem)))] + prompt(draw(st.integers(0, 9)), draw(st.integers(50, 52)))
        made.append(
            Job(
                at=draw(st.integers(0, 25)),
                prompt=ids,
                max_tokens=draw(st.integers(0, 16)),
                stop_ids=draw(st.lists(st.integers(0, 96), max_size=6)),
                min_tokens=draw(st.sampled_from([0, 0, 3])),
                abort_at=draw(st.none() | st.none() | st.integers(0, 40)),
            )
        )
    return made


@settings(max_examples=150, deadline=None)
@given(
    jobs=jobs(),
    windows=st.sampled_from([(None,), (None, 6), (None, 9), (5,), (None, 1), (8, None, 3)]),
    extra=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    page=st.sampled_from([1, 2, 4]),
    chunk=st.integers(1, 20),
    mixed_chunk=st.integers(1, 20),
    rows=st.integers(1, 6),
    overlap=st.booleans(),
)
def test_each_request_gets_the_tokens_it_gets_alone(
    jobs: list[Job],
    windows: tuple[int | None, ...],
    extra: list[int],
    page: int,
    chunk: int,
    mixed_chunk: int,
    rows: int,
    overlap: bool,
) -> None:
    limit = 56
    # Just enough for one request of full length, and what the draw adds: mostly too little for all.
    alone_needs = [
        limit // page if w is None else min(limit // page, (w + max(chunk, mixed_chunk)) // page + 2) for w in windows
    ]
    pages = [count + more for count, more in zip(alone_needs, extra, strict=False)]
    rig = Rig(windows, pages, page, max(chunk, mixed_chunk), min(chunk, mixed_chunk), rows, limit, overlap)
    for now in range(41):
        for rid, job in enumerate(jobs):
            if job.at == now:
                rig.add(rid, job.prompt, job.max_tokens, stop_ids=job.stop_ids, min_tokens=job.min_tokens)
            if job.abort_at == now:
                rig.abort(rid)
        rig.step()
    rig.run()
    for rid, job in enumerate(jobs):
        got = rig.got[rid]
        expected = alone(windows, job.prompt, job.max_tokens, job.stop_ids, job.min_tokens)
        if got.finish == "abort":
            assert got.ids == expected[: len(got.ids)]
            continue
        assert got.ids == expected
        assert got.finish == ("stop" if expected and expected[-1] in job.stop_ids else "length")
    assert sorted(rig.executor.released) == sorted(rig.got), "sampler state is left behind"
