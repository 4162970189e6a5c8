"""How many threads a pass of the CPU executor uses.

Threads meet about 200 times in a decode step and spin while they wait. That is the fastest way as long as each has a
core; when a core is taken by something else, everyone waits for whole time slices of the scheduler and a step takes ten
times as long. Then fewer threads are faster, and the rest of the machine gets its core.
"""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CROWDED = 9
"""Times that the kernel took a core away from us within two decode steps: about 2 when all are ours, and seldom under
this when one is not."""
PAUSE, LONGEST_PAUSE = 1.0, 8.0
"""Seconds until all threads are tried again; doubled each time that this fails."""
CALM = 20
"""Steps in a row with all threads that show that cores are free again."""


class Threads:
    """Use `step` around each decode step, from one thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        """At most so many."""
        self._used = count
        self._pause = PAUSE
        self._retry = 0.0
        self._calm = self._last = 0
        torch.set_num_threads(count)

    @contextmanager
    def step(self) -> Iterator[None]:
        if self._used < self.count and time.monotonic() >= self._retry:
            self._use(self.count)
        before = _preemptions()
        yield
        taken = _preemptions() - before
        crowded = self._last + taken >= CROWDED
        self._last = taken
        if crowded and self._used > 1:
            if self._used == self.count and self._calm < CALM:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._retry = time.monotonic() + self._pause
            self._use(self._used - 1)
        elif self._used == self.count:
            self._calm += 1
            if self._calm == CALM:
                self._pause = PAUSE

    def _use(self, count: int) -> None:
        torch.set_num_threads(count)
        self._used, self._calm, self._last = count, 0, 0


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
