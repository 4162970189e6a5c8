"""A deterministic model whose memory is nothing but its pages.

Each group's pages store token ids where a real model stores keys and values, and the next token is a function of all
that a query at the end can see in each group, read back through the row's page tables. A wrong table, a stale page or
a wrong prefix hit therefore changes the tokens.
"""

from collections.abc import Sequence

from northchat.engine.executor import Batch, ExecutorError, KVGroup, Row, Sampled
from northchat.engine.protocol import Logprob

VOCAB = 97


def groups(*windows: int | None) -> tuple[KVGroup, ...]:
    return tuple(KVGroup(f"group {n}", (n,), window, page_bytes=1000) for n, window in enumerate(windows))


def next_token(visible: Sequence[Sequence[int]], banned: Sequence[int] = ()) -> int:
    """The model: `visible` are the ids that the last query sees in each group, in order."""
    state = 7
    for ids in visible:
        state = state * 31 + len(ids)
        for token in ids:
            state = (state * 1_000_003 + token + 1) % 2_147_483_647
    state //= 5
    while state % VOCAB in banned:
        state += 1
    return state % VOCAB


def alone(
    windows: Sequence[int | None],
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """What a request must get, computed without pages, batches or scheduler."""
    ids = list(prompt)
    for count in range(max_tokens):
        visible = [ids if window is None else ids[-window:] for window in windows]
        ids.append(next_token(visible, stop_ids if count < min_tokens else ()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


class FakeExecutor:
    device = "fake"
    dtype = "int"
    vocab_size = VOCAB

    def __init__(
        self,
        windows: Sequence[int | None] = (None,),
        page: int = 4,
        max_context: int = 64,
        memory: int = 1 << 30,
        fail_at: int | None = None,
    ) -> None:
        self.groups = groups(*windows)
        self.max_context = max_context
        self.steps = 0
        self.computed = 0
        """Tokens of all rows so far."""
        self.released: list[int] = []
        self._windows = windows
        self._page = page
        self._memory = memory
        self._fail_at = fail_at
        self._pools: list[list[list[int | None]]] = []
        self._results: dict[int, list[Sampled]] = {}
        self._last: dict[int, int] = {}

    def free_memory(self) -> int:
        return self._memory

    def allocate(self, pages: Sequence[int]) -> None:
        assert not self._pools
        self._pools = [[[None] * self._page for _ in range(count)] for count in pages]

    def submit(self, batch: Batch) -> int:
        self.steps += 1
        rows = batch.decode + batch.prefill
        assert rows
        assert len({row.rid for row in rows}) == len(rows), "a request has two rows"
        assert all(len(row.tokens) == 1 and row.sample for row in batch.decode)
        self._check_writes(rows)
        self._results[self.steps] = [self._run(row) for row in rows]
        return self.steps

    def poll(self, handle: int) -> list[Sampled]:
        if self.steps == self._fail_at:
            raise ExecutorError("the fake device failed; buy a real one")
        return self._results.pop(handle)

    def release(self, rid: int) -> None:
        self.released.append(rid)
        self._last.pop(rid, None)

    def _check_writes(self, rows: Sequence[Row]) -> None:
        """No page that a row writes stands in another row's table."""
        for group in range(len(self._pools)):
            written = [set(row.pages[group][row.start // self._page :]) for row in rows]
            for row, pages in zip(rows, written, strict=True):
                assert -1 not in pages
                for other in rows:
                    assert other is row or pages.isdisjoint(other.pages[group])

    def _run(self, row: Row) -> Sampled:
        assert row.rid not in self.released
        tokens = [self._last[row.rid] if token == -1 else token for token in row.tokens]
        self.computed += len(tokens)
        end = row.start + len(tokens)
        visible = []
        for pool, table, window in zip(self._pools, row.pages, self._windows, strict=True):
            assert len(table) == -(-end // self._page)
            for position, token in enumerate(tokens, row.start):
                pool[table[position // self._page]][position % self._page] = token
            # All queries of the row must find their keys, not just the last one.
            first = 0 if window is None else max(0, row.start - window + 1)
            seen = [self._read(pool, table, position) for position in range(first, end)]
            visible.append(seen if window is None else seen[-window:])
        logprobs = []
        if row.prompt_logprobs is not None:
            logprobs = [Logprob(row.history[i], -1.0) for i in range(row.start + 1, min(end + 1, row.prompt_len))]
        if not row.sample:
            return Sampled(row.rid, None, prompt_logprobs=logprobs)
        token = self._last[row.rid] = next_token(visible, row.banned)
        logprob = None if row.sampling.logprobs is None else Logprob(token, -0.5)
        return Sampled(row.rid, token, logprob, logprobs)

    def _read(self, pool: list[list[int | None]], table: Sequence[int], position: int) -> int:
        page = table[position // self._page]
        assert page >= 0, "a page was let go that the window still sees"
        token = pool[page][position % self._page]
        assert token is not None, "a page was never written"
        return token
