"""Who holds which KV page, and which free pages still hold something worth finding again.

Layers come in groups (engine/executor.py), each with a pool of pages. A request's full pages carry a hash chained
over all its tokens so far, so equal hashes mean equal prefixes. A page that nobody holds keeps its hash until it
is taken for something else, least recently used first; until then a request that starts with the same tokens finds it.
"""

import os
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from northchat.engine.executor import PAGE, KVGroup


class Table:
    """One request's pages in every group, and the hash chain of its tokens, which outlives the pages."""

    __slots__ = ("hashes", "low", "marks", "offered", "pages")

    def __init__(self, groups: int) -> None:
        self.pages: tuple[list[int], ...] = tuple([] for _ in range(groups))
        """Per group: physical page of each logical page; -1 where a sliding group let go."""
        self.low = [0] * groups
        """Per group: first logical page still held."""
        self.hashes: list[bytes] = []
        """Of each full page of known tokens, as far as they were needed."""
        self.offered = 0
        """Logical pages whose contents the pools were told of."""
        self.marks: list[int] = []
        """Logical page numbers before which other requests are likely to branch off."""


class Pool:
    """The physical pages of one group: held (referenced), cached (free, findable by hash) or blank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.refs = [0] * size
        self.hash_of: list[bytes | None] = [None] * size
        self.page_of: dict[bytes, int] = {}
        # Free pages in the order in which they are taken; those in `kept` only after all others.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self.kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        return len(self.free) + len(self.kept)

    def take(self) -> int:
        """A page to overwrite; what it cached is forgotten. Raises KeyError when none is free."""
        page, _ = (self.free or self.kept).popitem(last=False)
        content = self.hash_of[page]
        if content is not None:
            del self.page_of[content]
            self.hash_of[page] = None
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        if self.refs[page] == 0:
            del (self.free if page in self.free else self.kept)[page]
        self.refs[page] += 1

    def drop(self, page: int, keep: bool = False) -> None:
        self.refs[page] -= 1
        if self.refs[page]:
            return
        blank = self.hash_of[page] is None
        (self.kept if keep and not blank else self.free)[page] = None
        if blank:
            self.free.move_to_end(page, last=False)

    def offer(self, page: int, content: bytes) -> None:
        """Say what a held page contains. Of two pages with equal contents the first stays findable."""
        if self.hash_of[page] is None and content not in self.page_of:
            self.hash_of[page] = content
            self.page_of[content] = page


class KVCache:
    """Page tables over one pool per group.

    `chunk` is the most tokens that one request computes in a step: it bounds what a sliding group holds at once.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        pages: Sequence[int],
        chunk: int,
        page_size: int = PAGE,
        key: bytes | None = None,
    ) -> None:
        self.page_size = page_size
        self.pools = [Pool(size) for size in pages]
        self._windows = [group.window for group in groups]
        self._peaks = [peak_pages(group.window, chunk, page_size) for group in groups]
        # A secret per process, so that nobody can prepare a prompt whose pages collide with another's.
        self._key = os.urandom(32) if key is None else key

    def table(self) -> Table:
        return Table(len(self.pools))

    def lookup(self, table: Table, ids: Sequence[int]) -> int:
        """Length of the longest cached prefix of `ids` that a table without pages can take; page aligned, never all.

        Every group must still have what its window needs from there on.
        """
        limit = (len(ids) - 1) // self.page_size
        reach = 0
        full = [pool for pool, window in zip(self.pools, self._windows, strict=True) if window is None]
        while reach < limit:
            if reach == len(table.hashes):
                self._hash_next(table, ids)
            if any(table.hashes[reach] not in pool.page_of for pool in full):
                break
            reach += 1
        hit = reach
        sliding = [(p, w) for p, w in zip(self.pools, self._windows, strict=True) if w is not None]
        checked = 0
        while hit and checked < len(sliding):
            pool, window = sliding[checked]
            missing = self._last_missing(pool, window, table, hit)
            if missing is None:
                checked += 1
            else:
                hit, checked = missing, 0
        if reach and reach not in table.marks:
            # Another request had the same up to here and parted; more will, so what they need is worth keeping.
            table.marks.append(reach)
        return hit * self.page_size

    def acquire(self, table: Table, hit: int) -> None:
        """Give a table without pages the cached prefix that `lookup` found, before anything else changes."""
        count = hit // self.page_size
        for group, pool in enumerate(self.pools):
            low = self._first_visible(group, hit)
            shared = [pool.page_of[table.hashes[index]] for index in range(low, count)]
            for page in shared:
                pool.share(page)
            table.pages[group][:] = [-1] * low + shared
            table.low[group] = low
        table.offered = count

    def demand(self, table: Table, tokens: int) -> list[int]:
        """Pages per group that a request of so many tokens may yet take beside those it holds."""
        count = -(-tokens // self.page_size)
        return [
            max(0, (count if peak is None else min(count, peak)) - len(pages) + low)
            for peak, pages, low in zip(self._peaks, table.pages, table.low, strict=True)
        ]

    def admits(self, table: Table, hit: int, tokens: int, reserved: Sequence[int]) -> bool:
        """Whether an empty table that takes `hit` cached tokens can grow to `tokens` and leave `reserved` pages."""
        count = hit // self.page_size
        for group, (pool, wanted, spare) in enumerate(
            zip(self.pools, self.demand(table, tokens), reserved, strict=True)
        ):
            shared = range(self._first_visible(group, hit), count)
            held = sum(pool.refs[pool.page_of[table.hashes[index]]] > 0 for index in shared)
            if pool.available - spare < wanted - held:
                return False
        return True

    def grow(self, table: Table, start: int, end: int) -> bool:
        """Make room for tokens [start, end), letting go of what no query from `start` on can see.

        Returns False, with nothing taken, when a pool has too few pages.
        """
        count = -(-end // self.page_size)
        for group, window in enumerate(self._windows):
            if window is not None and table.low[group] < (low := self._first_visible(group, start)):
                self._let_go(table, group, low)
        if all(len(pages) >= count for pages in table.pages):
            return True
        if any(pool.available < count - len(pages) for pool, pages in zip(self.pools, table.pages, strict=True)):
            return False
        for pool, pages in zip(self.pools, table.pages, strict=True):
            pages.extend(pool.take() for _ in range(count - len(pages)))
        return True

    def offer(self, table: Table, ids: Sequence[int], computed: int) -> None:
        """Make pages findable whose tokens are known and computed, in the step being launched at the latest."""
        full = min(computed, len(ids)) // self.page_size
        while table.offered < full:
            index = table.offered
            if index == len(table.hashes):
                self._hash_next(table, ids)
            for pool, pages in zip(self.pools, table.pages, strict=True):
                if pages[index] >= 0:
                    pool.offer(pages[index], table.hashes[index])
            table.offered += 1

    def release(self, table: Table) -> None:
        """Let go of all pages; the last ones of the chain are taken by others first."""
        for group, pool in enumerate(self.pools):
            pages = table.pages[group]
            for index in range(len(pages) - 1, table.low[group] - 1, -1):
                pool.drop(pages[index], self._marked(table, group, index))
        table.pages = tuple([] for _ in self.pools)
        table.low = [0] * len(self.pools)
        table.offered = 0

    def used(self) -> float:
        """Share of pages held, 0..1, of the group that is fullest."""
        return max(1 - pool.available / pool.size for pool in self.pools)

    def check_integrity(self, tables: Iterable[Table]) -> None:
        """Raise AssertionError unless `tables` hold exactly what the pools say, and free + cached + held = total."""
        held = [[0] * pool.size for pool in self.pools]
        for table in tables:
            for group, pages in enumerate(table.pages):
                low = table.low[group]
                assert all(page == -1 for page in pages[:low]), "a page below the window is still in the table"
                for page in pages[low:]:
                    held[group][page] += 1
        for pool, refs in zip(self.pools, held, strict=True):
            assert pool.refs == refs, "reference counts differ from what the requests hold"
            loose = [*pool.free, *pool.kept]
            assert len(set(loose)) == len(loose) == pool.available, "a page is free twice"
            assert all(refs[page] == 0 for page in loose), "a free page is held"
            assert pool.available + sum(count > 0 for count in refs) == pool.size, "a page is lost"
            known = {content: page for page, content in enumerate(pool.hash_of) if content is not None}
            assert known == pool.page_of, "the index of cached pages differs from the pages"
            assert sum(content is not None for content in pool.hash_of) == len(known), "two pages share a hash"

    def _hash_next(self, table: Table, ids: Sequence[int]) -> None:
        done = len(table.hashes)
        content = array("i", ids[done * self.page_size : (done + 1) * self.page_size]).tobytes()
        parent = table.hashes[-1] if done else b""
        table.hashes.append(blake2b(parent + content, digest_size=16, key=self._key).digest())

    def _first_visible(self, group: int, position: int) -> int:
        window = self._windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def _last_missing(self, pool: Pool, window: int, table: Table, count: int) -> int | None:
        first = max(0, count * self.page_size - window + 1) // self.page_size
        for index in range(count - 1, first - 1, -1):
            if table.hashes[index] not in pool.page_of:
                return index
        return None

    def _let_go(self, table: Table, group: int, low: int) -> None:
        pool, pages = self.pools[group], table.pages[group]
        low = min(low, len(pages))
        for index in range(table.low[group], low):
            pool.drop(pages[index], self._marked(table, group, index))
            pages[index] = -1
        table.low[group] = low

    def _marked(self, table: Table, group: int, index: int) -> bool:
        """Whether a request that branches off at a mark needs this page of a sliding group."""
        window = self._windows[group]
        if window is None:
            return False
        return any(self._first_visible(group, mark * self.page_size) <= index < mark for mark in table.marks)


def peak_pages(window: int | None, chunk: int, page_size: int = PAGE) -> int | None:
    """Most pages of a group that one request holds at once; None: as many as it has tokens for."""
    if window is None:
        return None
    # Window - 1 keys before a chunk and the chunk itself, lying across page borders at the worst offset.
    return (window + chunk - 3) // page_size + 2


def plan(
    groups: Sequence[KVGroup], memory: int, max_context: int, rows: int, chunk: int, page_size: int = PAGE
) -> tuple[list[int], int]:
    """Share `memory` bytes out: pages per group, and the longest context that one request can have, in tokens.

    Sliding groups get what `rows` requests hold at most, up to a third of the memory (but enough for one);
    full groups get the rest, up to what `rows` requests of full length need. The length is 0 when nothing fits.
    """
    whole = -(-max_context // page_size)
    peaks = [peak_pages(group.window, chunk, page_size) for group in groups]
    single = [whole if peak is None else min(peak, whole) for peak in peaks]
    sliding_bytes = sum(n * g.page_bytes for n, p, g in zip(single, peaks, groups, strict=True) if p is not None)
    full_bytes = sum(g.page_bytes for p, g in zip(peaks, groups, strict=True) if p is None)
    share = memory // 3 if full_bytes else memory
    fair = min(rows, max(1, share // sliding_bytes)) if sliding_bytes else 0
    rest = memory - fair * sliding_bytes
    full = min(rest // full_bytes, rows * whole) if full_bytes else whole
    if rest < 0 or full <= 0:
        return [0] * len(groups), 0
    pages = [full if peak is None else fair * count for peak, count in zip(peaks, single, strict=True)]
    return pages, min(max_context, full * page_size)
