"""The megakernel's schedule and packed weights, run by the interpreter: no GPU needed."""

import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from northchat.engine.interpreter import Deadlock, Interpreter, random_weights, reference_step
from northchat.engine.megakernel import (
    Get,
    Megakernel,
    Weights,
    kv_pool,
    pack_columns,
    pack_rows,
    unpack_columns,
    unpack_rows,
)
from northchat.engine.schedule import (
    HEAD_DIM,
    NORTH_MINI_CODE,
    PAGE,
    SMALL,
    UNIT,
    Dims,
    Kind,
    Op,
    Schedule,
    Task,
    build,
)

PAGES = 12


@pytest.fixture(scope="module")
def get() -> Get:
    make, made = random_weights(SMALL), {}

    def cached(name: str) -> torch.Tensor:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return cached


@pytest.fixture(scope="module")
def weights(get: Get) -> Weights:
    return Weights.pack(SMALL, get, device="cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pools(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [kv_pool(n, PAGES, SMALL.kv_heads, "cpu") for n in (SMALL.full_layers, SMALL.sliding_layers)]
    return made[0].normal_(generator=generator), made[1].normal_(generator=generator)


def cache_of(
    dims: Dims, both: tuple[torch.Tensor, torch.Tensor], tables: list[list[int]], position: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the pools hold of tokens 0..position-1, as the reference wants it."""
    out = []
    for layer in range(dims.layers):
        group = 0 if dims.full(layer) else 1
        pages = both[group][dims.index_in_group(layer)][tables[group]].float()
        tokens = pages.permute(2, 1, 0, 3, 4).reshape(2, dims.kv_heads, -1, HEAD_DIM)[:, :, :position]
        out.append((tokens[0], tokens[1]))
    return out


def tables(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(PAGES, generator=generator).tolist() for _ in range(2)]


# ---- the interpreter against the plain model ----


@pytest.mark.parametrize(
    ("position", "num_sms"), [(0, 12), (63, 12), (64, 9), (65, 12), (257, 33), (600, 12), (700, 132)]
)
def test_schedule_computes_the_model(get: Get, weights: Weights, position: int, num_sms: int) -> None:
    both, pages = pools(position), tables(position)
    cache = cache_of(SMALL, both, pages, position)
    it = Interpreter(weights, build(SMALL, num_sms), *both)
    token = it.step(5 + position, position, *pages)
    routing: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    want = reference_step(SMALL, get, 5 + position, position, cache, routing=routing, hidden=hidden)
    # Only the router multiplied into bf16 matrices differs from the reference.
    assert (it.logits - want).norm() < 1e-3 * want.norm()
    for mine, theirs in zip(it.hidden, hidden, strict=True):
        assert (mine - theirs).norm() < 1e-3 * theirs.norm()
    assert token == int(want.argmax())
    assert [set(r) for r in it.routing[1:]] == [set(r.tolist()) for r in routing]


def test_decoding_continues_from_its_own_cache(get: Get, weights: Weights) -> None:
    both, pages = pools(), tables()
    for pool in both:
        pool.fill_(float("nan"))  # what was never written must never count
    it = Interpreter(weights, build(SMALL, 12), *both)
    cache = [(torch.zeros(2, 0, HEAD_DIM), torch.zeros(2, 0, HEAD_DIM)) for _ in range(SMALL.layers)]
    for position, token in enumerate((11, 900, 3, 77)):
        it.step(token, position, *pages)
        want = reference_step(SMALL, get, token, position, cache)
        assert (it.logits - want).norm() < 1e-3 * want.norm()


def test_forced_experts_are_taken(get: Get, weights: Weights) -> None:
    both, pages = pools(), tables()
    forced = torch.arange(SMALL.top_k).repeat(SMALL.layers, 1)
    cache = cache_of(SMALL, both, pages, 9)
    it = Interpreter(weights, build(SMALL, 12), *both)
    it.step(1, 9, *pages, force_routing=forced)
    want = reference_step(SMALL, get, 1, 9, cache, force_routing=forced)
    assert (it.logits - want).norm() < 1e-3 * want.norm()


def test_units_are_produced_once_and_bytes_add_up(weights: Weights) -> None:
    schedule = build(SMALL, 12)
    it = Interpreter(weights, schedule, *pools())
    it.step(1, 70, *tables())
    want = Counter()
    for layer in range(SMALL.layers):
        experts = SMALL.top_k * SMALL.expert_units if layer else SMALL.dense_intermediate // UNIT
        for op, units in ((Op.QKV, SMALL.qkv_units), (Op.EXPERTS, experts), (Op.OPROJ, SMALL.oproj_units)):
            want.update({(layer, op, unit): 1 for unit in range(units)})
    want.update({(SMALL.layers, Op.HEAD, unit): 1 for unit in range(SMALL.vocab // UNIT)})
    assert it.produced == want
    for sm in range(12):
        assert it.streamed[sm, 0] == schedule.weight_bytes(sm, Kind.DENSE)
        assert it.streamed[sm, 1] == schedule.weight_bytes(sm, Kind.MIXTURE)
        assert it.streamed[sm, SMALL.layers] == schedule.weight_bytes(sm, Kind.HEAD)


def test_a_cycle_is_found(weights: Weights) -> None:
    # One SM projects attention's output before it has computed the query that others wait for.
    schedule = build(SMALL, 12)
    programs = {kind: [list(p) for p in per_sm] for kind, per_sm in schedule.programs.items()}
    first = programs[Kind.DENSE][0]
    first.sort(key=lambda task: task.op is Op.QKV)
    with pytest.raises(Deadlock, match="all SMs wait"):
        Interpreter(weights, Schedule(SMALL, 12, programs), *pools()).step(1, 70, *tables())


# ---- properties of any schedule ----


def covered(programs: list[list[Task]], op: Op) -> list[int]:
    return [unit for program in programs for t in program if t.op is op for unit in range(t.first, t.first + t.count)]


@settings(max_examples=40, deadline=None)
@given(num_sms=st.integers(40, 132), before=st.integers(0, 20), last=st.integers(0, 2))
def test_every_unit_is_dealt_once(num_sms: int, before: int, last: int) -> None:
    d = NORTH_MINI_CODE
    schedule = build(d, num_sms, before_attention=before, last_experts=last)
    for kind, experts in ((Kind.DENSE, d.dense_intermediate // UNIT), (Kind.MIXTURE, d.top_k * d.expert_units)):
        programs = schedule.programs[kind]
        assert sorted(covered(programs, Op.QKV)) == list(range(d.qkv_units))
        assert sorted(covered(programs, Op.EXPERTS)) == list(range(experts))
        assert sorted(covered(programs, Op.OPROJ)) == list(range(d.oproj_units))
        splits = [(t.first, t.count) for p in programs for t in p if t.op is Op.ATTENTION and t.count >= 0]
        assert sorted(splits) == [(g, s) for g in range(d.kv_heads) for s in range(schedule.splits)]
        for program in programs:
            ops = [t.op for t in program]
            # What a task waits for lies before it in its own list or in others' lists before their waits: no cycle.
            assert ops[0] is Op.QKV
            assert ops.index(Op.ATTENTION) < (ops.index(Op.OPROJ) if Op.OPROJ in ops else len(ops))
    assert covered(schedule.programs[Kind.HEAD], Op.HEAD) == list(range(d.vocab // UNIT))
    assert len(schedule.table()) == num_sms * len(Kind) * 8 * 4


def test_bytes_per_sm_are_even() -> None:
    schedule = build(NORTH_MINI_CODE, 132)
    for kind in (Kind.MIXTURE, Kind.HEAD):
        sizes = [schedule.weight_bytes(sm, kind) for sm in range(132)]
        assert max(sizes) <= 1.04 * sum(sizes) / len(sizes)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.8, 1.25), min_size=66, max_size=66))
def test_bytes_follow_the_weights_of_sms(speeds: list[float]) -> None:
    schedule = build(NORTH_MINI_CODE, 66, sm_weights=speeds)
    sizes = [schedule.weight_bytes(sm, Kind.MIXTURE) for sm in range(66)]
    for size, speed in zip(sizes, speeds, strict=True):
        share = sum(sizes) * speed / sum(speeds)
        assert abs(size - share) <= 0.04 * share + NORTH_MINI_CODE.expert_unit


@pytest.mark.parametrize(
    ("num_sms", "sm_weights"), [(3, None), (300, None), (12, [1.0] * 11), (4, [1.0, 1.0, 0.0, 1.0])]
)
def test_impossible_numbers_of_sms_are_refused(num_sms: int, sm_weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match="SM"):
        build(NORTH_MINI_CODE, num_sms, sm_weights=sm_weights)


# ---- layouts ----


@pytest.mark.parametrize("hidden", [1024, 2048])
def test_packing_rows_is_undone(hidden: int) -> None:
    weight = torch.arange(16 * hidden).view(16, hidden)
    assert torch.equal(unpack_rows(pack_rows(weight), hidden), weight)


def test_row_fragments_lie_as_the_tensor_cores_take_them() -> None:
    hidden, packed = 1024, pack_rows(torch.arange(8 * 1024).view(8, 1024))[0]
    # Warp 3, second k-step, lane 13 (row 3, column pair 1): a0..a3 are k and k+8 of the first and the second half.
    k = 3 * hidden // 16 + 16 + 2
    want = [3 * hidden + half + k + octet + i for octet in (0, 8) for half in (0, hidden // 2) for i in (0, 1)]
    at = ((3 * 4 + 1) * 32 + 13) * 8
    assert packed[at : at + 8].tolist() == want


def test_packing_columns_is_undone() -> None:
    weight, router = torch.randn(1024, 24), torch.randn(32, 24)
    rows, logits = unpack_columns(pack_columns(weight, router), 1024)
    assert torch.equal(rows, weight)
    assert torch.equal(logits, router)


def test_wrong_shapes_are_refused(get: Get) -> None:
    def wrong(name: str) -> torch.Tensor:
        tensor = get(name)
        return tensor[:-1] if "o_proj" in name else tensor

    with pytest.raises(ValueError, match=r"o_proj.*shape"):
        Weights.pack(SMALL, wrong, device="cpu")


def test_experts_one_by_one_pack_the_same(get: Get, weights: Weights) -> None:
    def single(name: str) -> torch.Tensor:
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            raise KeyError(name)
        if one := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            stem, expert, kind = one[1], int(one[2]), one[3]
            if kind == "down":
                return get(f"{stem}.down_proj")[expert]
            return get(f"{stem}.gate_up_proj")[expert].chunk(2)[kind == "up"]
        return get(name)

    again = Weights.pack(SMALL, single, device="cpu")
    for a, b in zip(weights.layers, again.layers, strict=True):
        # The product with the router may be summed in another order.
        torch.testing.assert_close(a.experts, b.experts, rtol=2**-7, atol=1e-4)


def test_pages_seen_from_a_position() -> None:
    d = NORTH_MINI_CODE
    assert d.span(0, 0) == (0, 0, 0)
    assert d.span(1, 64) == (0, 0, 1)
    assert d.span(1, 4095) == (0, 0, 64)
    assert d.span(1, 4096) == (1, 0, 64)
    assert d.span(1, 4097) == (2, 0, 65)
    assert d.span(4, 8192) == (0, 0, 128)
    assert d.span(1, 8192) == (8192 - 4095, 64, 64)
    assert d.full_layers + d.sliding_layers == d.layers
    assert [d.index_in_group(layer) for layer in (0, 1, 3, 4, 5, 48)] == [0, 0, 2, 1, 3, 12]
    assert PAGE == 64


# ---- page tables ----


def without_gpu() -> Megakernel:
    """A kernel of which only the page tables exist."""
    kernel = Megakernel.__new__(Megakernel)
    kernel._pools = pools()
    kernel._tables = (torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32))
    kernel._known = [(0, torch.empty(0, dtype=torch.int32), None)] * 2
    kernel.max_context = 16 * PAGE
    return kernel


def test_tables_are_uploaded_whenever_they_change() -> None:
    kernel = without_gpu()
    table = torch.tensor([4, 5, 6, 7], dtype=torch.int32)
    kernel._upload(0, table, 130, 0)
    assert kernel._tables[0][:3].tolist() == [4, 5, 6]
    table[1] = 9  # in place
    kernel._upload(0, table, 130, 0)
    assert kernel._tables[0][:3].tolist() == [4, 9, 6]
    kernel._upload(0, [1, 2, 3, 0], 200, 0)
    assert kernel._tables[0][:4].tolist() == [1, 2, 3, 0]
    kernel._upload(0, table.clone(), 130, 0)
    assert kernel._tables[0][:3].tolist() == [4, 9, 6]


@pytest.mark.parametrize(
    ("table", "position", "first"), [([0], 64, 0), ([0, PAGES], 64, 0), ([-1, 0], 64, 0), ([0] * 20, 17 * PAGE, 0)]
)
def test_wrong_tables_are_refused(table: list[int], position: int, first: int) -> None:
    with pytest.raises(ValueError, match="page_table_full"):
        without_gpu()._upload(0, table, position, first)


def test_pages_before_the_window_do_not_matter_until_they_are_seen() -> None:
    kernel = without_gpu()
    kernel._upload(1, [-1, -1, 3], 130, 2)
    with pytest.raises(ValueError, match="page_table_sliding"):
        kernel._upload(1, [-1, -1, 3], 130, 1)
