"""Fewer threads while something else holds a core, all again when it doesn't."""

from collections.abc import Callable, Iterator

import pytest
import torch

from northchat.engine import threads
from northchat.engine.threads import CALM, LONGEST_PAUSE, PAUSE, Threads


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Threads, float, int], int]]:
    """Runs a step at a time of the clock, in which so many preemptions happen; returns the threads that it had."""
    clock, taken, before = [0.0], [0], torch.get_num_threads()
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(threads, "_preemptions", lambda: taken[0])

    def run(under_test: Threads, now: float, preemptions: int) -> int:
        clock[0] = now
        with under_test.step():
            used = torch.get_num_threads()
            taken[0] += preemptions
        return used

    yield run
    torch.set_num_threads(before)


def test_a_few_preemptions_change_nothing(step: Callable[[Threads, float, int], int]) -> None:
    under_test = Threads(2)
    assert {step(under_test, now / 10, 3) for now in range(50)} == {2}


def test_backs_off_retries_and_backs_off_longer(step: Callable[[Threads, float, int], int]) -> None:
    under_test, now, pauses = Threads(2), 0.0, []
    for _ in range(6):
        assert step(under_test, now, 30) == 2
        start = now
        while step(under_test, now, 0) == 1:
            now += 0.25
        pauses.append(now - start)
    assert pauses[0] >= PAUSE
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE
    for _ in range(CALM + 1):
        step(under_test, now, 0)
    step(under_test, now, 30)
    assert step(under_test, now + 0.9, 0) == 1
    assert step(under_test, now + 1.1 * PAUSE, 0) == 2


def test_one_thread_stays(step: Callable[[Threads, float, int], int]) -> None:
    assert {step(Threads(1), now, 50) for now in range(5)} == {1}
