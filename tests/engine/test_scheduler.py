"""Scheduler and pages together, against a model that knows only what its pages say."""

from dataclasses import dataclass

import pytest
from fake_executor import alone
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig, prompt


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


@settings(max_examples=150, deadline=None, derandomize=True)
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


def test_one_long_prompt_is_computed_in_chunks_and_pads_nothing() -> None:
    rig = Rig(chunk=8)
    got = rig.add(1, prompt(21), max_tokens=1)
    rig.run()
    assert [output.computed for output in got.outputs] == [8, 16, 21]
    assert rig.executor.computed == 21
    assert got.ids == alone((None,), prompt(21), 1)


def test_prefill_chunks_shrink_while_others_decode() -> None:
    rig = Rig(chunk=8, mixed_chunk=3)
    rig.add(1, prompt(4), max_tokens=40)
    rig.step()
    rig.add(2, prompt(20, 5))
    launch = rig.step()
    assert [len(row.tokens) for row in launch.batch.decode] == [1]
    assert [len(row.tokens) for row in launch.batch.prefill] == [3]


def test_a_short_prompt_is_not_held_up_behind_a_long_one() -> None:
    rig = Rig(chunk=8)
    long = rig.add(1, prompt(60), max_tokens=2)
    rig.step()
    short = rig.add(2, prompt(6, 1), max_tokens=1)
    launch = rig.step()
    assert [len(row.tokens) for row in launch.batch.prefill] == [4, 4]
    launch = rig.step()
    assert [len(row.tokens) for row in launch.batch.prefill] == [6, 2]
    assert short.finish == "length"
    rig.run()
    assert long.finish == "length"


def test_requests_over_the_row_limit_wait_their_turn() -> None:
    rig = Rig(rows=2)
    for rid in range(5):
        rig.add(rid, prompt(3, rid))
    rig.step()
    assert (len(rig.scheduler.running), len(rig.scheduler.waiting)) == (2, 3)
    rig.run()
    for rid, got in rig.got.items():
        assert got.ids == alone((None,), prompt(3, rid), 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_out_of_pages_the_newest_gives_way_and_loses_no_token(overlap: bool) -> None:
    # Three requests grow to 8 pages each, 12 are there.
    rig = Rig(pages=(12,), overlap=overlap)
    finished = []
    for rid in range(3):
        rig.add(rid, prompt(6, rid), max_tokens=26)
    while rig.scheduler.busy:
        rig.step()
        finished += [rid for rid, got in rig.got.items() if got.finish and rid not in finished]
    rig.run()
    assert finished == [0, 1, 2]
    assert 1 <= rig.scheduler.preemptions <= 4, "requests push each other out again and again"
    for rid, got in rig.got.items():
        assert got.ids == alone((None,), prompt(6, rid), 26)
        assert got.cached == 0


def test_a_preempted_request_comes_back_before_later_ones() -> None:
    rig = Rig(pages=(12,), rows=2)
    order = []
    for rid in range(4):
        rig.add(rid, prompt(6, rid), max_tokens=26)
    while rig.scheduler.busy:
        rig.step()
        order += [rid for rid, got in rig.got.items() if got.finish and rid not in order]
    assert rig.scheduler.preemptions
    assert order == [0, 1, 2, 3]


def test_a_preempted_request_takes_its_own_pages_back_from_the_cache() -> None:
    rig = Rig(pages=(8,), chunk=32)
    first = rig.add(1, prompt(15), max_tokens=5)
    second = rig.add(2, prompt(12, 1), max_tokens=10)
    rig.run()
    assert rig.scheduler.preemptions == 1
    assert first.finish == second.finish == "length"
    # Besides 19 tokens of the first and 21 of the second, only those of the second's last, unfinished page.
    assert 40 < rig.executor.computed <= 43


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(8))
def test_abort_in_every_state(overlap: bool, steps: int) -> None:
    """Waiting, prefilling, decoding, preempted, and with a token on its way."""
    rig = Rig(windows=(None, 6), pages=(10, 8), rows=3, overlap=overlap)
    for rid in range(4):
        rig.add(rid, prompt(10, rid), max_tokens=20)
    for _ in range(steps):
        rig.step()
    for rid in (3, 1, 0):
        rig.abort(rid)
        assert rig.got[rid].finish == "abort"
    rig.run()
    assert rig.got[2].ids == alone((None, 6), prompt(10, 2), 20)
    for rid in (3, 1, 0):
        count = len(rig.got[rid].ids)
        assert rig.got[rid].ids == alone((None, 6), prompt(10, rid), 20)[:count]
    assert sorted(rig.executor.released) == [0, 1, 2, 3]


def test_a_launched_token_of_an_aborted_request_is_dropped() -> None:
    rig = Rig(overlap=True)
    got = rig.add(1, prompt(4), max_tokens=20)
    rig.step()
    rig.step()
    assert len(got.ids) == 1
    rig.abort(1)
    assert rig.executor.released == [], "the device still works on it"
    rig.run()
    assert len(got.ids) == 1
    assert rig.executor.released == [1]


def test_no_step_is_launched_beyond_the_last_token() -> None:
    rig = Rig(overlap=True)
    rig.add(1, prompt(4), max_tokens=5)
    rig.run()
    assert rig.executor.steps == 5


def test_generation_ends_at_a_stop_id() -> None:
    free = alone((None,), prompt(5), 12)
    stop = free[3]
    rig = Rig()
    got = rig.add(1, prompt(5), max_tokens=12, stop_ids=[stop])
    rig.run()
    assert got.ids == free[: free.index(stop) + 1]
    assert got.finish == "stop"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("min_tokens", range(7))
def test_no_stop_id_comes_before_min_tokens_and_any_may_come_after(overlap: bool, min_tokens: int) -> None:
    rig = Rig(overlap=overlap)
    stop = alone((None,), prompt(5), 12)[3]
    got = rig.add(1, prompt(5), max_tokens=12, stop_ids=[stop], min_tokens=min_tokens)
    rig.run()
    assert stop not in got.ids[:min_tokens]
    assert got.ids == alone((None,), prompt(5), 12, [stop], min_tokens)
    assert (len(got.ids) == 4) == (min_tokens <= 3)


def test_the_context_limit_ends_a_request() -> None:
    rig = Rig(limit=16)
    got = rig.add(1, prompt(10), max_tokens=1000)
    rig.run()
    assert len(got.ids) == 6
    assert got.finish == "length"
    (refusal,) = rig.add(2, prompt(16)).outputs
    assert refusal.finish == "error"
    assert "16" in refusal.message


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_come_once_and_whole_despite_cache_and_preemption(overlap: bool) -> None:
    # The first one grows from 5 to 9 pages while the second's prompt is computed token by token.
    rig = Rig(pages=(12,), mixed_chunk=1, chunk=18, overlap=overlap)
    rig.add(1, prompt(18), max_tokens=20)
    rig.step()
    got = rig.add(2, prompt(17, 1), max_tokens=4, prompt_logprobs=0)
    echo = rig.add(3, prompt(18), max_tokens=0, prompt_logprobs=0)
    rig.run()
    assert rig.scheduler.preemptions
    for request, ids in ((got, prompt(17, 1)), (echo, prompt(18))):
        assert [item.token for output in request.outputs for item in output.prompt_logprobs] == ids[1:]
        assert request.cached == 0
    assert got.ids == alone((None,), prompt(17, 1), 4)
    assert (echo.ids, echo.finish) == ([], "length")
