"""What is found again in the cache, exactly: pages of 4 tokens, sliding windows of 8."""

import pytest
from fake_executor import alone, groups
from rig import Got, Rig, prompt

from northchat.engine.kv_cache import KVCache, peak_pages, plan

MIXED = (None, 8)


def ask(rig: Rig, ids: list[int], max_tokens: int = 4) -> Got:
    """Run one request to its end; what it got is checked, so a wrong hit can't pass."""
    got = rig.add(100 + len(rig.got), ids, max_tokens)
    rig.run()
    assert got.ids == alone(rig.windows, ids, max_tokens)
    return got


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(None,), MIXED])
def test_a_conversation_that_grows_at_its_end(windows: tuple[int | None, ...], overlap: bool) -> None:
    rig = Rig(windows, pages=(64,) * len(windows), overlap=overlap)
    history = prompt(20)
    # The last token of each answer is never computed; whole pages count of 23, 28, 34 and 39 tokens.
    for turn, expected in enumerate([0, 20, 28, 32, 36]):
        got = ask(rig, history)
        assert got.cached == expected
        history = [*history, *got.ids, *prompt(1 + turn % 2, turn)]


def test_the_whole_prompt_is_never_taken_from_the_cache() -> None:
    rig = Rig(MIXED, pages=(64, 64))
    assert [ask(rig, prompt(16)).cached for _ in range(2)] == [0, 12]
    assert [ask(rig, prompt(17)).cached for _ in range(2)] == [16, 16]


def test_two_branches_of_one_prefix() -> None:
    rig = Rig(MIXED, pages=(64, 64))
    stem = prompt(18)
    ask(rig, stem)
    assert ask(rig, stem + prompt(9, 1)).cached == 16
    assert ask(rig, stem + prompt(9, 2)).cached == 16
    assert ask(rig, stem + prompt(9, 1) + [1]).cached == 24


def test_branches_that_run_side_by_side_share_what_is_computed() -> None:
    rig = Rig(pages=(64,), chunk=8)
    stem = prompt(32)
    rig.add(1, [*stem, 1], 12)
    for _ in range(4):
        rig.step()
    assert rig.got[1].finish is None
    assert ask(rig, [*stem, 2]).cached == 32
    assert rig.scheduler.cache.used() == 0


def test_a_second_agent_shares_only_the_system_prompt() -> None:
    system = prompt(24)
    rig = Rig((None,), pages=(64,))
    ask(rig, system + prompt(30, 1))
    assert ask(rig, system + prompt(30, 2)).cached == 24

    # With a window, the pages before the branch are old ones that the first agent let go; they are still there.
    rig = Rig(MIXED, pages=(64, 64))
    ask(rig, system + prompt(30, 1))
    assert ask(rig, system + prompt(30, 2)).cached == 24


def test_a_branch_that_others_came_to_is_kept_longest() -> None:
    system = prompt(24)
    rig = Rig(MIXED, pages=(64, 10), chunk=8)
    ask(rig, system + prompt(30, 1))
    # The window's pages at the end of the system prompt went to the first agent's own tokens: all is computed again.
    assert ask(rig, system + prompt(30, 2)).cached == 0
    # That showed where agents part; the pages there outlive what the second agent computed after them.
    assert ask(rig, system + prompt(30, 3)).cached == 24
    assert ask(rig, system + prompt(30, 4)).cached == 24


def test_rewind_after_the_windows_pages_went() -> None:
    history = prompt(40)
    rig = Rig(MIXED, pages=(64, 6), chunk=4)
    ask(rig, history)
    # Going on is possible; the full group alone would allow 20 here, but the window's pages [12, 20) are gone.
    assert ask(rig, [*history, 1, 2]).cached == 40
    assert ask(rig, [*history[:20], 5, 6]).cached == 0
    rig = Rig((None,), pages=(64,))
    ask(rig, history)
    assert ask(rig, [*history[:20], 5, 6]).cached == 20


@pytest.mark.parametrize(("again", "cached"), [(1, 8), (2, 16), (3, 16)])
def test_eviction_under_pressure_takes_the_oldest_and_its_tail_first(again: int, cached: int) -> None:
    rig = Rig((None,), pages=(12,), chunk=16)
    # After two prompts 10 of 12 pages are cached and 2 blank; the third takes those and the first's last three.
    for seed in (1, 2, 3):
        ask(rig, prompt(20, seed), 1)
    assert ask(rig, prompt(20, again), 1).cached == cached


def test_what_was_used_lately_survives() -> None:
    rig = Rig((None,), pages=(12,), chunk=16)
    ask(rig, prompt(20, 1), 1)
    ask(rig, prompt(20, 2), 1)
    ask(rig, prompt(20, 1), 1)
    ask(rig, prompt(20, 3), 1)
    assert ask(rig, prompt(20, 1), 1).cached == 16


def test_equal_pages_computed_twice_are_one_in_the_cache() -> None:
    rig = Rig((None,), pages=(32,), chunk=16)
    # Admitted in one step, so neither finds the other's.
    rig.add(1, prompt(8))
    rig.add(2, prompt(8))
    rig.run()
    assert rig.got[1].cached == rig.got[2].cached == 0
    assert rig.got[1].ids == rig.got[2].ids == alone((None,), prompt(8), 4)
    assert ask(rig, prompt(9)).cached == 8


def test_hashes_depend_on_all_tokens_before_and_on_the_process() -> None:
    def hashes(ids: list[int], key: bytes | None = b"key") -> list[bytes]:
        cache = KVCache(groups(None), [4], chunk=8, page_size=4, key=key)
        table = cache.table()
        assert cache.grow(table, 0, 8)
        cache.offer(table, ids, 8)
        return table.hashes

    one = hashes([1, 2, 3, 4, 5, 6, 7, 8])
    other = hashes([1, 2, 3, 9, 5, 6, 7, 8])
    assert [len(value) for value in one] == [16, 16]
    assert one == hashes([1, 2, 3, 4, 5, 6, 7, 8])
    assert not set(one) & set(other)
    assert not set(hashes([1] * 8, None)) & set(hashes([1] * 8, None))


def test_growing_beyond_the_pool_takes_nothing() -> None:
    cache = KVCache(groups(None, 4), [4, 2], chunk=4, page_size=4)
    table = cache.table()
    assert not cache.grow(table, 0, 12)
    cache.check_integrity([table])
    assert cache.used() == 0
    assert cache.grow(table, 0, 8)
    assert cache.used() == 1.0
    # Token 8 sees 5..8: the first page of the window's group is let go and taken again.
    assert cache.grow(table, 8, 9)
    assert table.pages[1][0] == -1
    assert table.pages[1][2] >= 0
    cache.check_integrity([table])


def test_check_integrity_finds_what_is_lost_or_held_twice() -> None:
    cache = KVCache(groups(None), [4], chunk=4, page_size=4)
    table = cache.table()
    assert cache.grow(table, 0, 8)
    cache.check_integrity([table])
    for tables in ([], [table, table]):
        with pytest.raises(AssertionError, match="reference counts"):
            cache.check_integrity(tables)
    cache.pools[0].free.popitem()
    with pytest.raises(AssertionError, match="lost"):
        cache.check_integrity([table])


@pytest.mark.parametrize("window", [1, 2, 4, 7, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8])
def test_a_sliding_group_never_holds_more_than_its_peak(window: int, chunk: int) -> None:
    most = 0
    for offset in range(4):
        cache = KVCache(groups(window), [64], chunk, page_size=4)
        table = cache.table()
        start = 0
        for size in (offset, *[chunk] * 20):
            if size:
                assert cache.grow(table, start, start + size)
                most = max(most, len(table.pages[0]) - table.low[0])
            start += size
    peak = peak_pages(window, chunk, 4)
    assert peak is not None
    assert peak - 1 <= most <= peak


def test_plan_shares_memory_between_groups() -> None:
    # Full: as much as memory has, no more than all rows can use.
    assert plan(groups(None), 10_500, 64, rows=4, chunk=8, page_size=4) == ([10], 40)
    assert plan(groups(None), 1 << 30, 64, rows=4, chunk=8, page_size=4) == ([64], 64)
    # A request's window and chunk take 5 pages; those of all 4 rows, or of as many as fit a third of the memory.
    assert plan(groups(None, 8), 90_000, 4000, rows=4, chunk=8, page_size=4) == ([70, 20], 280)
    assert plan(groups(None, 8), 30_000, 4000, rows=4, chunk=8, page_size=4) == ([20, 10], 80)
    assert plan(groups(None, 8), 6_000, 4000, rows=4, chunk=8, page_size=4) == ([1, 5], 4)
    assert plan(groups(None, 8), 5_000, 4000, rows=4, chunk=8, page_size=4) == ([0, 0], 0)
    assert plan(groups(8), 20_000, 4000, rows=4, chunk=8, page_size=4) == ([20], 4000)
